"""Limits on the sizes of arrays, grids and programs: refusals beyond int32 or int64, warnings of slow compilation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from types import MappingProxyType
from typing import Literal

from tilekern import source
from tilekern.errors import LargeProgramWarning, TargetError
from tilekern.ir.core import Func, Op
from tilekern.ir.memory import MemoryOp

LONGEST_INT32 = 2**31 - 1
"""The largest number of elements along a dim, or of programs, that int32 counts."""

MOST_PROGRAMS = 2**62
"""The largest number of programs that int64 counts, with room to round it up."""

MOST_OPERATIONS = 50_000
"""Operations of a program above which compilers take minutes; no kernel of the library has more than 2,000."""

_NONE: Mapping[Op, int] = MappingProxyType({})


type _Action = Literal["warn", "raise", "ignore"]
_action: ContextVar[_Action] = ContextVar("tilekern_large_programs", default="warn")


@contextmanager
def large_programs(action: _Action) -> Generator[None]:
    """Inside, in this thread, a `LargeProgramWarning` is raised, or left out, in the place of being issued."""
    token = _action.set(action)
    try:
        yield
    finally:
        _action.reset(token)


def warn_of_large_program(message: str, loc: source.Loc) -> None:
    """Issue a `LargeProgramWarning` at a line.

    Raises:
      LargeProgramWarning: inside of `large_programs("raise")`.
    """
    match _action.get():
        case "raise":
            raise LargeProgramWarning(message)
        case "warn":
            warnings.warn_explicit(message, LargeProgramWarning, loc.file, loc.line)
        case "ignore":
            pass


def warn_large(func: Func, target: str, written_out: Mapping[Op, int] = _NONE) -> bool:
    """Issue a `LargeProgramWarning` if a program takes compilers long; it names the line with most operations.

    A backend calls it twice: first with the Func that it is given, as legalisation takes long, too.

    Args:
      func: the Func.
      target: the target's name.
      written_out: the number of operations of each op that the backend unrolls.

    Returns:
      True if the warning was issued.
    """
    lines = Counter[source.Loc]()
    for op in func.walk():
        lines[op.loc] += written_out.get(op, 1)
    if lines.total() <= MOST_OPERATIONS:
        return False
    ((loc, most),) = lines.most_common(1)
    message = (
        f"{func.name} becomes {lines.total()} operations for {target}, {most} of them from this line: "
        "compiling it may take minutes.\n  fix: take smaller blocks; loop with tk.serial, not Python's for; "
        "sort, gather, or store at odd places, fewer elements at once"
    )
    warn_of_large_program(message, loc)
    return True


def refuse_large(func: Func, backend: str, *, longest: int | None = None, programs: int = MOST_PROGRAMS) -> Func:
    """Refuse an array or a grid that is larger than a backend counts.

    Args:
      func: the Func, after `vmap` has added to its arrays and its grid.
      backend: the backend's name, for the error.
      longest: the largest number of elements along a dim of an array; None for no limit.
      programs: the largest number of programs of the grid.

    Raises:
      TargetError: the Func exceeds a limit.
    """
    seen = [(p, p.ref.shape) for p in func.params]
    seen += [(op.ref, op.extents) for op in func.walk() if isinstance(op, MemoryOp) and op.access.extents is not None]
    with source.at(func.loc):
        for param, shape in seen:
            if longest is not None and max(shape, default=0) > longest:
                how = "" if shape == param.ref.shape else f", reshaped to {list(shape)}"
                raise TargetError(
                    f"an array of {func.name} is too long for {backend}",
                    expected=f"at most {longest} elements along each dim: positions are int32",
                    got=f"{param.name}: {param.ref}{how}",
                    fix='reshape it to two shorter dims, or use target="cpu:llvm"',
                )
        if prod(func.grid) > programs:
            raise TargetError(
                f"the grid of {func.name} is too large for {backend}",
                expected=f"at most {programs} programs",
                got=f"{prod(func.grid)} programs, {' × '.join(map(str, func.grid))}",
                fix="take larger blocks, or loop with tk.serial",
            )
    return func
