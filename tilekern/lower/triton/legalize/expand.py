"""Write dots, sorts and atomics that Triton lacks, or means otherwise, by ops that it has.

Needs: a verified Func. Gives: a Func with the same outputs, in which

    dots            are of operands that tensor cores or Triton's own loops take; see `expand_dot`
    sorts, top-k    are of signed keys; sorts find positions, or pick their only key; see `expand_order`
    atomics         the maxima and minima of floats have NaN of the sign that wins
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Atomic
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import kind_of
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.legalize import expand_order
from tilekern.lower.triton.legalize.expand_dot import expand_dot


def expand(func: Func, chip: Chip) -> Func:
    """Apply the rewrites above."""
    return Rewriter(partial(_rule, chip)).run(func)


def _rule(chip: Chip, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Dot():
            replacement = expand_dot(make, op, chip)
        case Sort():
            replacement = expand_order.sort(make, op, rewriter)
        case TopK():
            replacement = expand_order.top_k(make, op)
        case Atomic(kind="max" | "min") if kind_of(op.ref.ref.dtype) == "float":
            return rewriter.add(_with_sign_of_nan(make, op))
        case _:
            replacement = None
    return None if replacement is None else [replacement]


def _with_sign_of_nan(make: Make, op: Atomic) -> Atomic:
    """Give NaN the sign that wins: atomic maxima and minima compare bits, so +NaN is above all numbers, -NaN below."""
    value = op.value
    nan = np.copysign(np.asarray(np.nan, value.tile.dtype), 1 if op.kind == "max" else -1)
    marked = make.select(make.of("ne", value, value), make.constant(nan, value.tile), value)
    return op.copy((op.ref, marked, *op.operands[2:]))
