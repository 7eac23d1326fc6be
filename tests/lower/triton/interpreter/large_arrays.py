"""A process that runs programs in Triton's interpreter on arrays that are larger than this machine's memory.

Arrays lie in memory that is mapped, and takes room only where something is written (MAP_NORESERVE). Pickled `Job`s
arrive on standard input; each is answered by the rows of the results that it asks for, or by an error.
The checks of the interpreter stay: an access outside of the array, or to another one, is an error.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilekern.ir.types import DTYPES, DType
from tilekern.lower.triton.interpreter import launch, memory
from tilekern.lower.triton.interpreter.corrections import correct
from tilekern.lower.triton.interpreter.triton_interpreter import TritonInterpreter

_MAP_NORESERVE = 0x4000  # of Linux (asm-generic/mman.h); Python 3.12 has no name for it

Rows = Mapping[int, np.ndarray]
"""Rows of an array by their numbers, those of its first dim."""


@dataclass(frozen=True)
class Job:
    """Some programs of a launch.

    Attributes:
      request: the launch, as `tilekern.lower.triton.interpret` describes it to its child.
      shapes: shapes of the inputs.
      rows: the rows of each input that are not 0.
      programs: the programs to run, in order.
      wanted: the rows of each result to return.
    """

    request: dict[str, Any]
    shapes: Sequence[tuple[int, ...]]
    rows: Sequence[Rows]
    programs: Sequence[int]
    wanted: Sequence[int]


def lazy(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Zeros that take no room."""
    size = max(1, prod(shape) * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype, prod(shape)).reshape(shape)


class Buffer(memory.Buffer):
    """A buffer of which nobody records the owners of elements, for want of room."""

    def __init__(self, name: str, number: int, data: Any, *, written: bool = False, fresh: bool = False) -> None:
        super().__init__(name, number, data, fresh=fresh)
        self._written = written

    def check_written(self) -> None:
        """Only some programs run."""


class Memory(memory.Memory):
    """Memory that copies nothing, and lets any program write to results, in any order."""

    def add(self, name: str, data: Any, *, written: bool = False, fresh: bool = False) -> Buffer:
        buffer = Buffer(name, len(self._buffers) + 1, data, written=written, fresh=fresh)
        self._buffers.append(buffer)
        return buffer

    def _check_order(self, buffer: memory.Buffer, elements: Any, lanes: Any, access: Any) -> None:
        pass

    def _claim(self, buffer: memory.Buffer, elements: Any, dtype: DType) -> None:
        assert isinstance(buffer, Buffer) and buffer._written, f"a store to {buffer.name}"

    def _owner(self, buffer: memory.Buffer, dtype: DType) -> Any:
        self._claim(buffer, None, dtype)
        return _Nobody()


class _Nobody:
    """The owners of elements: nobody is told of them."""

    def __setitem__(self, elements: Any, program: int) -> None:
        pass


def run(job: Job, triton: TritonInterpreter) -> list[Rows]:
    """Run a job, and return the wanted rows of its results."""
    launch.Memory, launch._fresh = Memory, _fresh
    launch._order = lambda programs, order: job.programs
    dtypes = dict(zip(job.request["operands"], (a["dtype"] for a in job.request["arguments"]), strict=False))
    arrays = [lazy(shape, DTYPES[dtypes.get(n, "i32")]) for n, shape in enumerate(job.shapes)]
    for array, rows in zip(arrays, job.rows, strict=True):
        for number, row in rows.items():
            array[number] = row
    results = launch.Launcher(triton).run(job.request, arrays)
    return [{n: np.array(result[n]) for n in job.wanted} for result in results]


def _fresh(memory: Memory, label: str, result: dict[str, Any]) -> Buffer:
    return memory.add(label, lazy(tuple(result["shape"]), DTYPES[result["dtype"]]), written=True)


def serve() -> None:
    """Answer until the input ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    triton = correct()
    with contextlib.suppress(EOFError):
        while True:
            job = Job(**pickle.load(sys.stdin.buffer))
            try:
                answer: Any = run(job, triton)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    serve()
