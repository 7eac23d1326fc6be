"""The lowering of a Func by the backend of its target."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.errors import LargeProgramWarning, TilekernError
from tilekern.ir.core import Func
from tilekern.lower.backend import Lowering, Target
from tilekern.lower.sizes import large_programs
from tilekern.lower.target import backend_of


def lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
    """Lower a Func that went through the pipeline of passes.

    Args:
      func: the Func.
      target: the device to run on.
      launch: launch options that somebody chose.
    """
    return backend_of(target).lower(func, target, launch)


def specialized(func: Func, target: Target, launch: Mapping[str, int], always: bool = False) -> Lowering | None:
    """Lower a Func to a warp-specialised program; None if it has no such form, does not compile, or is not worth it.

    Args:
      func: the Func, with the blocks for that emitter.
      target: the device to run on, with the emitter "gluon".
      launch: launch options that somebody chose.
      always: True for each Func with such a form that compiles, worth it or not: somebody timed it.
    """
    specialize = backend_of(target).specialize
    return None if specialize is None else specialize(func, target, launch, always)


def is_refused(func: Func, target: Target, launch: Mapping[str, int], large: bool = False) -> bool:
    """True if a target other than a CPU does not take a Func: its blocks are too large, say.

    A program that it takes with a warning that it is large counts as refused, unless `large`.

    CPUs take blocks of any size, and lowering for them takes long.
    """
    if backend_of(target).hardware == "CPU":
        return False
    try:
        with large_programs("ignore" if large else "raise"):
            lower(func, target, launch)
    except (TilekernError, LargeProgramWarning):
        return True
    return False
