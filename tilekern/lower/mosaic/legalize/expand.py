"""Write the ops that find, order and move elements in terms of those that Mosaic has.

Needs: a widened Func. Gives: a Func without `ArgReduce`, `Scan`, `Sort`, `TopK`, `Pad`, `Reverse`, `DynamicSlice`,
`DynamicUpdateSlice` and strided slices; see `along`, `order`, `places`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.compute import Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Pad, Reverse, Slice
from tilekern.lower.mosaic.legalize import along, order, places
from tilekern.lower.rewrite.make import Make


def expand(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if any(not v.tile.size for v in op.results):
        return None  # of no element: removed in the end
    make = Make(rewriter, op)
    match op:
        case Reduce():
            found = along.reduce(make, op)
        case ArgReduce():
            found = along.arg_reduce(make, op)
        case Scan():
            found = along.scan(make, op)
        case Sort():
            found = order.sort(make, op)
        case TopK():
            found = order.top_k(make, op)
        case _:
            return _moved(make, op)
    return [found]


def _moved(make: Make, op: Op) -> Sequence[Value] | None:
    match op:
        case Pad():
            found = places.pad(make, op)
        case Reverse():
            found = places.reverse(make, op)
        case Slice() if set(op.stride) - {1}:
            found = places.slice_(make, op)
        case DynamicSlice():
            found = places.dynamic_slice(make, op)
        case DynamicUpdateSlice():
            found = places.dynamic_update_slice(make, op)
        case Take():
            found = places.take(make, op)
        case _:
            return None
    return [found]
