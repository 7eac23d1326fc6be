"""Tasks of a program, called one by one without XLA: on memory between pages that must not be touched, in any order."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.plan.task_partition import partial_sums_of
from tilekern.lower.llvm.program import TASK

End = Literal["begin", "end"]
Place = Callable[[int], "Memory"]
"""Allocates so many bytes."""

_PAGE = mmap.PAGESIZE
_names = itertools.count()


@dataclass(frozen=True)
class Memory:
    """Some bytes."""

    address: int
    nbytes: int
    owner: Any

    def array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """The memory as an array."""
        raw = (ctypes.c_char * self.nbytes).from_address(self.address)
        return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape) if self.nbytes else np.zeros(shape, dtype)


def anywhere(nbytes: int) -> Memory:
    """Memory with nothing special around it, aligned to 64 bytes."""
    owner = np.empty(nbytes + 64, np.uint8)
    return Memory(-(-owner.ctypes.data // 64) * 64, nbytes, owner)


class Canaries:
    """Memory between bytes that must stay as they are: finds stray stores, and lets the process live."""

    _MARGIN, _BYTE = 128, 0xC3

    def __init__(self) -> None:
        self._given: list[Memory] = []

    def __call__(self, nbytes: int) -> Memory:
        memory = anywhere(nbytes + 2 * self._MARGIN)
        memory.array((memory.nbytes,), np.uint8)[...] = self._BYTE
        self._given.append(memory)
        return Memory(memory.address + self._MARGIN, nbytes, memory.owner)

    def untouched(self) -> bool:
        """True if they did."""
        all_bytes = [m.array((m.nbytes,), np.uint8) for m in self._given]
        around = (part for x in all_bytes for part in (x[: self._MARGIN], x[-self._MARGIN :]))
        return all((part == self._BYTE).all() for part in around)


def guarded(end: End) -> Place:
    """Memory that begins, or ends, at a page which the process may neither read nor write."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def allocate(nbytes: int) -> Memory:
        inner = max(1, -(-nbytes // _PAGE)) * _PAGE
        owner = mmap.mmap(-1, inner + 2 * _PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(owner))
        for guard in (first, first + _PAGE + inner):
            assert libc.mprotect(guard, _PAGE, 0) == 0, ctypes.get_errno()
        # Memory of no byte must not be touched at all: its address is that of a guard.
        last = first + _PAGE + inner - nbytes
        return Memory(first + _PAGE if end == "begin" and nbytes else last, nbytes, owner)

    return allocate


def run(
    lowering: LlvmLowering, inputs: Sequence[Array], place: Place = anywhere, seed: int | None = None
) -> list[Array]:
    """The outputs, whose memory held garbage; if there is a `seed`, tasks run in a random order."""
    program, func = lowering.program, lowering.func
    shares = partial_sums_of(lowering.legal)
    types = [(p.ref.shape, p.ref.dtype) for p in func.outputs] + [(s.shape, s.dtype) for s in shares]
    types += [((1,), np.dtype(np.int32))] * bool(program.checks)
    arrays = [np.asarray(x, p.ref.dtype) for x, p in zip(inputs, func.inputs, strict=True)]
    before = [_placed(x, place) for x in arrays]
    behind: list[tuple[Memory, Array]] = []
    for number, (shape, dtype) in enumerate(types):
        zeroed = number in program.zeroed
        filled = np.full(int(np.prod(shape)) * dtype.itemsize, 0 if zeroed else 0xA5, np.uint8)
        if dtype == np.bool_:
            filled &= 1
        behind.append(_placed(filled.view(dtype).reshape(shape), place))
    for number, param in enumerate(func.outputs):
        if param in func.inputs:
            at = func.inputs.index(param)
            behind[number] = before[at]
    scratch = place(max(-(-program.scratch // 64), 1) * 64)  # as much as the handler gives, at least
    addresses = (ctypes.c_void_p * (len(before) + len(behind)))(*(m.address for m, _ in (*before, *behind)))
    tasks = list(range(program.tasks))
    if seed is not None:
        Random(seed).shuffle(tasks)
    task = _task(lowering)
    for number in tasks:
        task(ctypes.addressof(addresses), number, scratch.address)
    outputs = [x.copy() for _, x in behind]
    for share, parts in zip(shares, outputs[len(func.outputs) :], strict=False):
        at = func.outputs.index(share.ref)
        outputs[at] = sum(parts, outputs[at].astype(share.dtype)).astype(outputs[at].dtype)
    return outputs[: len(func.outputs)]


def _placed(array: Array, place: Place) -> tuple[Memory, Array]:
    memory = place(array.nbytes)
    found = memory.array(array.shape, array.dtype)
    found[...] = array
    return memory, found


@cache
def _task(lowering: LlvmLowering) -> Callable[[int, int, int], None]:
    """The program's function `TASK`."""
    code = toolchain.machine_code(lowering.text, lowering.machine)
    library = toolchain._link(f"task{next(_names)}", code, [TASK], toolchain.imported())
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(library[TASK])
    task.library = library  # the code goes with it
    return task
