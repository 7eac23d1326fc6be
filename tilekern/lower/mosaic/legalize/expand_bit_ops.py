"""Functions whose meaning lies in the bits, of all dtypes, by those that Mosaic has; see `rewrite.expand_bits`."""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BOOL
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.make import Make


def expand_bit_ops(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, Elementwise) or op.operands[0].tile.dtype == BOOL:
        return None
    found = expand_bits(Make(rewriter, op), op)
    return None if found is None else [found]
