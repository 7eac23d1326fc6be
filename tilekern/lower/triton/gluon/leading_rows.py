"""Masks of loads that keep the first rows of a tile, as masks by lengths do.

The Tensor Memory Accelerator knows no masks. It copies such a tile whole, and a program that computes sets the rows
behind to 0 in shared memory before a product reads them: their elements may be NaN, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Constant
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Iota


@record
class Bound:
    """A row r is kept if the sum of `starts`, which is not negative, and r are below `limit`.

    Attributes:
      limit: an int32 scalar, or a vector of one number.
      starts: int32 scalars.
    """

    limit: Value
    starts: tuple[Value, ...]


def leading_rows(func: Func, ranges: Mapping[Value, Interval]) -> dict[Load, tuple[Bound, ...]]:
    """The bounds of loads of two dims whose masks keep the first rows, and no other rows.

    Args:
      func: a legal Func.
      ranges: intervals of its scalars.
    """
    definers = definitions(func)
    bounds_by_load: dict[Load, tuple[Bound, ...]] = {}
    for op in func.walk():
        if isinstance(op, Load) and op.mask is not None and len(op.access.shape) == 2:
            mask = definers.get(op.mask)
            if isinstance(mask, Broadcast) and mask.dims == (0,):
                bounds = _bounds(mask.operands[0], definers, ranges)
                if bounds is not None:
                    bounds_by_load[op] = bounds
    return bounds_by_load


def _bounds(value: Value, definers: Mapping[Value, Op], ranges: Mapping[Value, Interval]) -> tuple[Bound, ...] | None:
    """The bounds of a vector of bools; None if it is no conjunction of comparisons of rows with scalars."""
    op = definers.get(value)
    if not isinstance(op, Elementwise):
        return None
    if op.function == "and":
        sides = [_bounds(v, definers, ranges) for v in op.operands]
        return None if sides[0] is None or sides[1] is None else (*sides[0], *sides[1])
    if op.function not in ("lt", "gt"):
        return None
    row, limit = op.operands if op.function == "lt" else op.operands[::-1]
    starts = _starts(row, definers)
    not_negative = starts is not None and all(v in ranges and ranges[v].low >= 0 for v in starts)
    return (Bound(limit, starts),) if starts is not None and not_negative and _is_uniform(limit, definers) else None


def _starts(value: Value, definers: Mapping[Value, Op]) -> tuple[Value, ...] | None:
    """(s, t, ...) for the vector row + s + t + ..., where `row` numbers the rows; None for another vector."""
    op = definers.get(value)
    if isinstance(op, Iota):
        return ()
    if not isinstance(op, Elementwise) or op.function != "add":
        return None
    for row, scalar in (op.operands, op.operands[::-1]):
        starts, broadcast = _starts(row, definers), definers.get(scalar)
        if starts is not None and isinstance(broadcast, Broadcast) and not broadcast.operands[0].tile.shape:
            return (*starts, broadcast.operands[0])
    return None


def _is_uniform(value: Value, definers: Mapping[Value, Op]) -> bool:
    """True for a vector of one number."""
    op = definers.get(value)
    broadcast = isinstance(op, Broadcast) and not op.operands[0].tile.shape
    return broadcast or (isinstance(op, Constant) and not op.array.shape)
