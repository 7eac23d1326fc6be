"""Removal of the ops for derivatives alone, and then of all that can be simplified.

Needs: a Func after `IMPROVE`. Gives: a Func without `Stop` and `Custom`.

    stop_gradient(x)             → x
    custom_derivative(x, y, ...) → x
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.rewrite import Rewriter
from tilekern.passes import pipeline


def remove_derivatives(func: Func) -> Func:
    """Apply the rewrites above."""
    without = Rewriter(_remove).run(func)
    return func if without is func else pipeline.run(without)


def _remove(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    return op.operands[:1] if isinstance(op, (Stop, Custom)) else None
