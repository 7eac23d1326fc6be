"""Scale a maximum instead of each of its elements, on request of a backend.

Needs: a canonical Func. Gives: no maximum or minimum of products with a positive constant is left where the rule saw
it.

    reduce max (x * c)               → (reduce max x) * c             (c > 0; also min)
    reduce max (select(p, x * c, k)) → reduce max (select(p, x, k) * c), and then the above
                                       (k = ±inf, and no other op needs x * c)

A machine that multiplies and adds in one instruction computes x * c - m so, with m the scaled maximum of an online
softmax. Before, the maximum needed each product by itself.

Rounding keeps the order of numbers, so that the largest product is the product of the largest number, bit for bit: NaN
stays NaN, infinities stay, and a product that overflows is the largest before and after. The constant is a normal
number: 0 * inf is NaN, also for a subnormal that a machine reads as 0. Only the sign of a zero may differ, where
products of both signs underflow: then a maximum may be either zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from tilekern.ir.compute import Reduce, Select
from tilekern.ir.constants import splat_of
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import kind_of


def sink_scales(func: Func) -> Func:
    """Apply the rewrites above."""
    uses: dict[Value, int] = {}
    ordered: set[Value] = set()
    for op in func.walk():
        results = (v for region in op.regions for v in region.results)
        for value in (*op.operands, *results):
            uses[value] = uses.get(value, 0) + 1
        if _orders(op):
            ordered.update(op.operands)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if _orders(op):
            return _reduce(op, rewriter)
        if isinstance(op, Select) and op.result in ordered:
            return _select(op, rewriter, uses)
        return None

    return Rewriter(rule).run(func)


def _orders(op: Op) -> bool:
    """True for a maximum or minimum of floats that have infinities."""
    if not isinstance(op, Reduce) or op.monoid not in ("max", "min"):
        return False
    dtype = op.operands[0].tile.dtype
    return kind_of(dtype) == "float" and dtype.itemsize > 1


def _reduce(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    """`reduce max (x * c)` → `(reduce max x) * c`."""
    scaled = _scaled(op.operands[0], rewriter)
    if scaled is None or op.result.tile.size == op.operands[0].tile.size:
        return None
    x, factor = scaled
    make = Make(rewriter, op)
    (extreme,) = rewriter.visit(op.copy((x,)))
    return [make.of("mul", extreme, make.constant(factor, op.result.tile))]


def _select(op: Select, rewriter: Rewriter, uses: dict[Value, int]) -> Sequence[Value] | None:
    """`select(p, x * c, k)` → `select(p, x, k) * c`, also with the branches the other way around."""
    predicate, *branches = op.operands
    for place, (product, filler) in enumerate((branches, branches[::-1])):
        scaled, filler_splat = _scaled(product, rewriter), splat_of(filler, rewriter)
        if scaled is None or filler_splat is None or not np.isinf(filler_splat) or uses.get(product) != 1:
            continue
        x, factor = scaled
        make = Make(rewriter, op)
        chosen = rewriter.one(op.copy((predicate, *((x, filler), (filler, x))[place])))
        return [make.of("mul", chosen, make.constant(factor, op.result.tile))]
    return None


def _scaled(value: Value, rewriter: Rewriter) -> tuple[Value, Any] | None:
    """(x, constant) if a value is the product of x and a positive normal constant; else None."""
    op = rewriter.definition(value)
    if not isinstance(op, Elementwise) or op.function != "mul":
        return None
    for number, factor in (op.operands, op.operands[::-1]):
        by = splat_of(factor, rewriter)
        if by is not None and cast(Any, ml_dtypes.finfo(by.dtype)).smallest_normal <= by < np.inf:
            return number, by
    return None
