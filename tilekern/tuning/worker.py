"""The process that compiles, checks and times candidates: `python -m tilekern.tuning.worker FOLDER`.

It may hang or die of a candidate. It reads a message a line, and answers each by a line:

    {"do": "try", "file": FILE, "first": true, "most": 1e-3} → {"estimate": 1e-4, "seconds": 2e-4}
    {"do": "time", "files": [FILE, …], "rounds": 7}          → {"samples": [[1e-4, …], …]}

or {"refused": the reason}.

FOLDER/setup.json is a `Setup`. FILE is a saved kernel (`tilekern.kernel.file_format`) with a candidate's settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import EstimateError, FallbackWarning, TilekernError
from tilekern.ir.core import Array
from tilekern.ir.types import F64, kind_of
from tilekern.kernel.file_format import decode
from tilekern.kernel.interface import Interface
from tilekern.kernel.stages import Traced
from tilekern.lower.target import Target
from tilekern.testing.benchmark import interleaved
from tilekern.testing.calls import Call
from tilekern.testing.simulation import longest_sum
from tilekern.testing.tolerance import bound_of, errors

_QUICK, _MORE = 0.1, 4  # seconds of a call, up to which more calls are made, and how many
_FACTOR, _FACTOR_OF_GRADIENTS = 2.0, 3.0  # as `tilekern.testing.check`


@dataclass(frozen=True)
class Setup:
    """The call that candidates make.

    Attributes:
      x64: True if JAX has 64-bit types on.
      gradient: True for the gradient by all arrays of floats.
      runs: True if candidates run on this machine; else they are estimated only.
      estimates: True to estimate candidates, too.
      extents: the numbers in arrays that decide how often loops run, for estimates.
      arrays: for each array of the arguments True if FOLDER/argument-N holds it; else its numbers are random.
      has_reference: True if FOLDER/oracle-N and FOLDER/low-N hold the results of a reference; else the first candidate
        writes FOLDER/low-N.
    """

    x64: bool
    gradient: bool
    runs: bool
    estimates: bool
    extents: dict[str, Any]
    arrays: list[bool]
    has_reference: bool

    def save(self, folder: Path) -> None:
        """Write it to a folder."""
        (folder / "setup.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Setup:
        """Read it from a folder."""
        return cls(**json.loads((folder / "setup.json").read_text()))


def call_of(interface: Interface, gradient: bool) -> Call:
    """The call of a kernel with random arrays."""
    leaves, tree = _jax.flatten(interface.arguments)
    return Call(tree, tuple(leaves), gradient=gradient)


@dataclass(frozen=True)
class Program:
    """A compiled candidate.

    Attributes:
      run: takes the arrays of the call, and returns the results.
      length: the number of terms of the longest sum.
    """

    run: Callable[..., Sequence[Any]]
    length: int


class Worker:
    """The candidates, on the arrays of one call."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._setup = folder, Setup.load(folder)
        self._arrays: list[Any] | None = None
        self._kept = cache(self._compiled)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message."""
        try:
            if message["do"] == "time":
                programs = [self._kept(file) for file in message["files"]]
                return {"samples": interleaved([partial(p.run, *self._inputs()) for p in programs], message["rounds"])}
            return self._try(message["file"], message["first"], message["most"])
        except TilekernError as error:
            return {"refused": f"{type(error).__name__}: {error.summary}"}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}

    def _try(self, file: str, first: bool, most: float | None) -> dict[str, Any]:
        estimate = self._estimate(file)
        if not self._setup.runs:
            return {"estimate": estimate}
        if estimate is not None and most is not None and estimate > most:
            return {"refused": "its estimate is too long"}
        program = self._compiled(file)
        outputs = [np.asarray(x) for x in program.run(*self._inputs())]
        if first and not self._setup.has_reference:
            for number, out in enumerate(outputs):
                out.tofile(self._folder / f"low-{number}")
        elif wrong := self._wrong(outputs, program.length):
            return {"refused": wrong}
        return {"estimate": estimate, "seconds": self._first_seconds(partial(program.run, *self._inputs()))}

    def _first_seconds(self, run: Callable[[], Any]) -> float:
        """The fastest of some calls: another process compiles or runs on the same cores."""
        [[seconds]] = interleaved([run], 1)
        if seconds > _QUICK:
            return seconds
        return min(seconds, *interleaved([run], _MORE)[0])

    # --- programs ---

    def _loaded(self, file: str) -> tuple[Traced, Interface, Target]:
        kernel, interface, target = decode(Path(file).read_text(encoding="ascii"), file)
        return Traced(kernel, interface, target), interface, target

    def _estimate(self, file: str) -> float | None:
        """The estimated seconds; None where candidates run, and no quick model follows them."""
        try:
            return self._model(file) if self._setup.estimates else None
        except EstimateError:
            if not self._setup.runs:
                raise
            return None

    def _model(self, file: str) -> float:
        traced, _, target = self._loaded(file)
        if self._setup.gradient:
            return sum(part.lower(target.full_name).estimate().seconds for part in traced.gradient().backward)
        return traced.lower(target.full_name).estimate(**self._setup.extents).seconds

    def _compiled(self, file: str) -> Program:
        traced, interface, _ = self._loaded(file)
        call = call_of(interface, self._setup.gradient)
        if self._arrays is None:
            self._arrays = [jnp.asarray(x) for x in self._numbers(call)]
        run = jax.jit(call.function(traced)).lower(*self._arrays).compile()
        sizes = [n for t in call.types for n in t.shape] if self._setup.gradient else []
        return Program(run, max([longest_sum(traced.ir), *sizes]))

    def _numbers(self, call: Call) -> list[Array]:
        pairs = enumerate(zip(call.arrays, self._setup.arrays, strict=True))
        return [
            np.fromfile(self._folder / f"argument-{n}", x.dtype).reshape(x.shape) if is_given else x
            for n, (x, is_given) in pairs
        ]

    def _inputs(self) -> list[Any]:
        assert self._arrays is not None
        return self._arrays

    # --- results ---

    def _wrong(self, outputs: Sequence[Array], length: int) -> str:
        """The reason why outputs are wrong; "" if they are right."""
        for number, out in enumerate(outputs):
            low: Array = np.fromfile(self._folder / f"low-{number}", out.dtype)
            if low.size != out.size:
                return f"result {number} has another size than the reference's"
            if kind_of(out.dtype) != "float":
                if (low.reshape(out.shape) != out).any():
                    return f"wrong numbers in result {number}"
            elif (problem := self._far(number, out, low.reshape(out.shape), length)) > 0:
                return f"wrong numbers in result {number}: {problem:.3g} times the allowed error"
        return ""

    def _far(self, number: int, out: Array, low: Array, length: int) -> float:
        """The largest error in units of what the rule of `tilekern.testing` allows, if it is more than 1; else 0."""
        factor = _FACTOR_OF_GRADIENTS if self._setup.gradient else _FACTOR
        oracle: Array = low.astype(F64)
        if self._setup.has_reference:
            numbers = cast(Array, np.fromfile(self._folder / f"oracle-{number}", F64))
            oracle = numbers.reshape(out.shape)
        bound = bound_of(oracle, low, length=length, factor=factor)
        if not self._setup.has_reference:
            # The first candidate stands for the oracle. Both may be as far from the truth as the rule allows.
            bound *= 2
        worst = float(errors(out, oracle).max(initial=0.0))
        if worst <= bound:
            return 0.0
        return worst / bound if bound else float("inf")


# --- the process ------------------------------------------------------------------------------------------------------


def _messages(stream: TextIO) -> queue.Queue[str]:
    """The lines of a stream. The process ends with the stream: a parent that dies leaves no process that hangs."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main(folder: Path) -> None:
    """Answer messages until the parent closes the stream."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what kernels print must not stand among the answers
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # without memory Linux ends this process first
    warnings.simplefilter("error", FallbackWarning)
    messages = _messages(sys.stdin)
    worker = Worker(folder)
    jax.config.update("jax_enable_x64", Setup.load(folder).x64)
    answers.write("ready\n")
    while True:
        answers.write(json.dumps(worker.answer(json.loads(messages.get()))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
