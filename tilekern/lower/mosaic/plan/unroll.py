"""Unrolling of loops inside of the kernel, so that matrix and vector units work at the same time.

A reduction of a dot's result, such as the maximum of logits, waits for the dot; so within one iteration the matrix
units or the vector units are idle. The first dot of the next iteration needs no carries. If both iterations are in one
basic block, the compiler moves that dot up. Attention forward takes 2 to 15 % less by the static estimate.

A dot of a stack of matrices is many dots, and none waits for another. A loop with such a dot is not unrolled: it would
run as long, and take three times as long to compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Value
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.records import record
from tilekern.lower.mosaic.calibration import DEFAULT_UNROLLED, MAX_UNROLLED

_FULL = 8
"""The number of independent products of 64 or 128 rows that keeps four matrix units busy."""


@record
class Unrolling:
    """The unrolling of a loop inside of the kernel.

    Attributes:
      factor: the iterations in a row.
      is_loop: False if there is no loop any more: all iterations are unrolled.
    """

    factor: int = 1
    is_loop: bool = True


def unrolling_of(op: Fold, ranges: Mapping[Value, Interval]) -> Unrolling:
    """The unrolling of a loop: none unless a dot or a reduction depends on another dot, and no dot has a stack.

    The factor is `MAX_UNROLLED` only where it divides the trip count: the code for remaining iterations would be large.
    """
    trips = trip_count(op, ranges)
    if trips in (0, 1):
        return Unrolling(1, False)
    if not _has_dependent_compute(op) or _has_stacks(op):
        return Unrolling()
    if trips is not None and trips <= MAX_UNROLLED:
        return Unrolling(trips, False)
    return Unrolling(DEFAULT_UNROLLED if trips is None or trips % MAX_UNROLLED else MAX_UNROLLED)


def trip_count(op: Fold, ranges: Mapping[Value, Interval]) -> int | None:
    """The iterations of a loop; None if they are unknown before the program runs."""
    start, stop = (ranges.get(bound) for bound in (op.start, op.stop))
    if start is None or stop is None or not (start.known and stop.known):
        return None
    return max(0, op.axis.end_tile(stop.low) - op.axis.first_tile(start.low))


def _has_dependent_compute(op: Fold) -> bool:
    """True if a dot or a reduction of an iteration depends on another dot of the iteration."""
    later = set[Value]()  # results of the iteration's dots, and all values that depend on them
    for inner in op.body.ops:
        follows = not later.isdisjoint(inner.operands)
        if follows and isinstance(inner, Dot | Reduce | ArgReduce):
            return True
        if follows or isinstance(inner, Dot):
            later.update(inner.results)
    return False


def _has_stacks(op: Fold) -> bool:
    """True if a dot multiplies at least `_FULL` pairs of matrices: so many fill the matrix units."""
    dots = (inner for inner in op.body.ops if isinstance(inner, Dot))
    return any(prod(dot.operands[0].tile.shape[d] for d in dot.batch[0]) >= _FULL for dot in dots)
