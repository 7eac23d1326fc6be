"""Marks of accesses as in bounds (`!` in the text form): a mark that a text claims without proof is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.analysis.ranges import analyze, proved_dims, update
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Rewriter


def without_unproved(func: Func) -> Func:
    """The Func with `Dim.in_bounds` only where the intervals of its values prove it."""
    if not any(isinstance(op, MemoryOp) and any(d.in_bounds for d in op.access.dims) for op in func.walk()):
        return func
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, MemoryOp):
            return None
        dims = zip(op.access.dims, proved_dims(op, ranges), strict=True)
        access = op.access.marked(dim.in_bounds and is_proved for dim, is_proved in dims)
        return None if access == op.access else rewriter.add(replace(op, access=access))

    return Rewriter(rule).run(func)
