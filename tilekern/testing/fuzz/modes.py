"""The ways to run random programs: passes, the text form, batches, orders, derivatives, and the backends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from tilekern.errors import ResourceError, TargetError
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import DTYPES, F64
from tilekern.ir.verify import verify
from tilekern.lower.backend import Backend, FuzzMode
from tilekern.lower.target import BACKENDS
from tilekern.passes import pipeline
from tilekern.passes.batch import batch
from tilekern.passes.delay_dots import delay_dots
from tilekern.passes.guard_masks import guard_masks
from tilekern.passes.sink_scales import sink_scales
from tilekern.passes.split_loops import split_loops
from tilekern.testing.fuzz import derivatives, verdicts
from tilekern.testing.fuzz.backends import Outputs, outputs_of
from tilekern.testing.programs import FEATURES, Program
from tilekern.testing.programs.batches import ProgramRunner
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.divisible import Divisible
from tilekern.testing.programs.index_vectors import Chains
from tilekern.testing.programs.parts import assert_parts_agree
from tilekern.testing.programs.products import Products

NARROW = tuple(d for d in DTYPES.values() if d.itemsize <= 4)
"""The dtypes that every target has."""


@dataclass(frozen=True)
class Mode:
    """A way to run random programs.

    Attributes:
      name: of a target, or of a transformation.
      run: from programs to their outputs, which must be the interpreter's.
      options: of the programs; see `tilekern.testing.programs.build`.
      batch: how many programs run at once.
      package: the package that it needs.
    """

    name: str
    run: ProgramRunner
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: int = 30
    package: str = ""


# --- transformations ------------------------------------------------------------------------------------------------


def by_interpreter(programs: Sequence[Program], *, change: Callable[[Func], Func]) -> Outputs:
    """The outputs of changed programs, by the interpreter."""
    return [interpret(change(p.func), *p.arrays, orders=1) for p in programs]


def on_request(func: Func) -> Func:
    """The passes that backends ask for."""
    guard = partial(guard_masks, beside=_always)
    delay = partial(delay_dots, beside=_always, pays=_always)
    for improve in (sink_scales, guard, delay, split_loops):
        func = improve(pipeline.run(func, check=True))
        verify(func)
    return pipeline.run(func, check=True)


def _always(dot: Any) -> bool:
    del dot
    return True


def through_text(func: Func) -> Func:
    """The text form, and back."""
    text = to_text(func)
    again = parse(text)
    assert to_text(again) == text
    return again


def in_any_order(programs: Sequence[Program]) -> Outputs:
    """The outputs, which do not depend on the order of programs."""
    return [interpret(p.func, *p.arrays, orders=3) for p in programs]


def batched(programs: Sequence[Program]) -> Outputs:
    """The outputs of the second of two runs; the first one is on zeros, and inputs of odd number are shared."""
    return [[output[1] for output in _batched(p)] for p in programs]


def _batched(program: Program) -> Sequence[Array]:
    func, size = program.func, 2
    dims = [0 if n % 2 == 0 or p.ref.role == "inout" else None for n, p in enumerate(func.inputs)]
    pairs = zip(program.arrays, dims, strict=True)
    arrays = [x if d is None else np.stack([np.zeros_like(x), x]) for x, d in pairs]
    return interpret(batch(func, size, dims), *arrays, orders=1)


def judged(programs: Sequence[Program]) -> Outputs:
    """The outputs that programs should have, if the interpreter finds faults that are planted in them."""
    for program in programs:
        verdicts.check(program)
    return [program.expected for program in programs]


def in_parts(programs: Sequence[Program]) -> Outputs:
    """The outputs that programs should have, if each device's part of a program computes its part of the outputs."""
    for program in programs:
        assert_parts_agree(program.func, program.arrays)
    return [program.expected for program in programs]


def differentiated(programs: Sequence[Program]) -> Outputs:
    """The outputs, if the derivatives are JAX's, and each other's transpose."""
    with jax.enable_x64(True):
        for program in programs:
            derivatives.check(program)
    return [program.expected for program in programs]


def _quietly(run: ProgramRunner) -> ProgramRunner:
    """The same runner, whose prints go nowhere."""

    def quiet(programs: Sequence[Program]) -> Outputs:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return run(programs)

    return quiet


def modes(wild: type[Generator]) -> list[Mode]:
    """All modes: transformations first, then the modes of each backend.

    Args:
      wild: the generator of programs that print and assert, which some backends take, and that mask by ranges.
    """
    options = _options(wild)
    improve = partial(pipeline.run, check=True)
    return [
        Mode("passes", partial(by_interpreter, change=improve), options["all"]),
        Mode("passes on request", partial(by_interpreter, change=on_request), options["all"]),
        Mode("text", _quietly(partial(by_interpreter, change=through_text)), options["debug"]),
        Mode("orders", in_any_order),
        Mode("batches", batched),
        Mode("verdicts", judged),
        Mode("parts", in_parts, {"make": Divisible}),
        Mode("derivatives", differentiated, {"dtypes": (F64,)}, batch=8),
        *(_mode_of(backend, mode, options) for backend in BACKENDS.values() for mode in backend.fuzz_modes),
    ]


def _options(wild: type[Generator]) -> dict[str, dict[str, Any]]:
    """The options of programs, by `FuzzMode.programs`."""
    return {
        "plain": {},
        "all": {"make": wild, "features": (*FEATURES, "live", "monoids")},
        "debug": {"make": wild, "features": (*FEATURES, "debug")},
        "index vectors": {"make": Chains},
        "products": {"make": Products},
    }


def _mode_of(backend: Backend, mode: FuzzMode, options: Mapping[str, dict[str, Any]]) -> Mode:
    """The mode that a backend's record describes; its package may be missing if programs are interpreted without."""
    narrow = {"dtypes": NARROW} if mode.narrow else {}
    run = partial(outputs_of, mode=mode.name)
    package = "" if backend.interprets_without or mode.outputs else backend.package
    quiet = _quietly(run) if mode.programs == "debug" else run
    return Mode(mode.name, quiet, narrow | options[mode.programs], mode.batch, package)


REFUSALS = (TargetError, ResourceError)
"""Errors by which a target refuses a program."""
