"""Removal of the ops that mean something to derivatives alone.

Needs: a verified Func. Gives: a Func without `Stop`.

    stop_gradient(x) → x
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.derivatives import Stop
from tilekern.ir.rewrite import Rewriter


def remove_derivatives(func: Func) -> Func:
    """Apply the rewrite above."""
    return Rewriter(_remove).run(func)


def _remove(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    return op.operands if isinstance(op, Stop) else None
