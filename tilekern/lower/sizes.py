"""The sizes of arrays and grids that backends can count, and the refusal of larger ones."""

from __future__ import annotations

from math import prod

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.core import Func
from tilekern.ir.memory import MemoryOp

LONGEST_INT32 = 2**31 - 1
"""Elements along a dim, or programs, that int32 counts."""

MOST_PROGRAMS = 2**62
"""Programs that int64 counts, with room for the rounding of their number."""


def refuse_large(func: Func, backend: str, *, longest: int | None = None, programs: int = MOST_PROGRAMS) -> None:
    """Raise a `TargetError` for an array or a grid that is larger than a backend counts.

    Args:
      func: the Func, after `vmap` has added to its arrays and its grid.
      backend: its name in the error.
      longest: elements along a dim of an array; None for no limit.
      programs: programs of the grid.
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
