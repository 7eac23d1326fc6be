"""Write ops that reduce, sort and move elements by ops that Mosaic has.

Needs: a Func after `widen_moves`. Gives: a Func without `ArgReduce`, `Scan`, `LinearScan`, `Sort`, `TopK`, `Pad`,
`Reverse`, `DynamicSlice`, `DynamicUpdateSlice` and strided slices; see `reductions`, `sorts`, `movement`, `interleave`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilekern.ir.compute import Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Pad, Reverse, Slice
from tilekern.lower.mosaic.legalize import movement, reductions, sorts
from tilekern.lower.mosaic.legalize.interleave import interleave


def expand(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


_RULES: dict[type[Op], Callable[[Make, Any], Value]] = {
    Reduce: reductions.reduce,
    ArgReduce: reductions.arg_reduce,
    Scan: reductions.scan,
    LinearScan: reductions.linear_scan,
    Sort: sorts.sort,
    TopK: sorts.top_k,
    Pad: movement.pad,
    Reverse: movement.reverse,
    Slice: movement.slice_,
    DynamicSlice: movement.dynamic_slice,
    DynamicUpdateSlice: movement.dynamic_update_slice,
    Take: movement.take,
}


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if any(not v.tile.size for v in op.results):
        return None  # `dce` removes it
    if (interleaved := interleave(op, rewriter)) is not None:
        return [interleaved]
    rule = _RULES.get(type(op))
    plain = isinstance(op, Slice) and set(op.stride) <= {1}
    return None if rule is None or plain else [rule(Make(rewriter, op), op)]
