"""Drop masks, bounds checks and comparisons whose outcome is proved.

Needs: a verified Func. Gives: `Dim.in_bounds` where the intervals of `ir.analysis.ranges` prove it; no position outside
the array is ever proved.

    load, store whose lanes all lie in the array  → the same, with that dim marked `in_bounds`
    integer or bool op with one possible value    → that constant (a comparison that always holds → true)
    max(x, y), min(x, y) where x always wins      → x
    load, store masked by true                    → without the mask
    store masked by false                         → no op
    load masked by false                          → its fill
    load that reads every lane, with a fill       → without the fill
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilekern.ir.analysis.ranges import FALSE, TRUE, Interval, analyze, proved_dims, update
from tilekern.ir.compute import Constant, splat
from tilekern.ir.constants import constant
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast


def elide_masks(func: Func) -> Func:
    """Apply the rewrites above."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if isinstance(op, MemoryOp):
            return _memory(op, ranges, rewriter)
        if op.pure and len(op.results) == 1 and not isinstance(op, Constant):
            return _single_value(op, ranges, rewriter) or _winner(op, ranges)
        return None

    return Rewriter(rule).run(func)


def _single_value(op: Op, ranges: dict[Value, Interval], rewriter: Rewriter) -> Sequence[Value] | None:
    """Op with one possible value → that constant."""
    interval = ranges.get(op.result)
    if interval is None or not interval.known:
        return None
    value = rewriter.one(constant(np.asarray(interval.low, op.result.tile.dtype), op))
    ranges[value] = interval
    return [value]


def _winner(op: Op, ranges: dict[Value, Interval]) -> Sequence[Value] | None:
    """`max(x, y)`, `min(x, y)` where one operand always wins → that operand."""
    if not isinstance(op, Elementwise) or op.function not in ("max", "min"):
        return None
    x, y = op.operands
    for winner, loser in ((x, y), (y, x)):
        greater, less = (winner, loser) if op.function == "max" else (loser, winner)
        if greater in ranges and less in ranges and ranges[greater].low >= ranges[less].high:
            return [winner]
    return None


def _memory(op: MemoryOp, ranges: dict[Value, Interval], rewriter: Rewriter) -> Sequence[Value] | None:
    """Load, store → with proved dims, without a constant mask; no store where the mask is false."""
    mask = None if op.mask is None else ranges.get(op.mask)
    if mask == FALSE:
        return [_fill(op, rewriter)] if isinstance(op, Load) else []
    dims = zip(op.access.dims, proved_dims(op, ranges), strict=True)
    access = op.access.marked(dim.in_bounds or is_proved for dim, is_proved in dims)
    if mask == TRUE:
        number = op.leading + op.access.arity
        op = replace(op, masked=False, operands=(*op.operands[:number], *op.operands[number + 1 :]))
    if isinstance(op, Load) and op.filled and not op.masked and access.in_bounds:
        op = replace(op, filled=False, operands=op.operands[:-1])
    elif mask != TRUE and access == op.access:
        return None
    return rewriter.add(replace(op, access=access))


def _fill(op: Load, rewriter: Rewriter) -> Value:
    """The fill of a load: its result in lanes that it does not read."""
    tile = op.result.tile
    if op.fill is None:
        return rewriter.one(splat(0, tile, hint=op.hint, loc=op.loc))
    return rewriter.one(Broadcast(operands=(op.fill,), shape=tile.shape, dims=(), hint=op.hint, loc=op.loc))
