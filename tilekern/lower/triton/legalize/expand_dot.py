"""Dots of dtypes that `tl.dot` does not take."""

from __future__ import annotations

from math import prod

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.ir.types import BF16, F16, F32, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.make import Make
from tilekern.lower.triton.chip import Chip


def expand_dot(make: Make, op: Dot, chip: Chip) -> Value | None:
    """Integers but int8 as sums of products, and floats as the dtype that is multiplied.

    That is for float32 the cheaper one that the precision names, and for 8-bit floats, where tensor cores do not take
    them, float16, which has all their numbers.
    """
    dtype = op.operands[0].tile.dtype
    if dtype == F32 and op.precision == "bf16":
        return _converted(make, op, BF16)
    if is_float8(dtype) and not chip.float8:
        return _converted(make, op, F16)
    if kind_of(dtype) == "float" or dtype == np.dtype(np.int8):
        return None
    return _sum_of_products(make, op)


def _converted(make: Make, op: Dot, dtype: DType) -> Value:
    lhs, rhs = (make.convert(x, dtype) for x in op.operands)
    return make.add(Dot, lhs, rhs, contract=op.contract, batch=op.batch)


def _sum_of_products(make: Make, op: Dot) -> Value:
    """Every product at once, summed along the contracted dims; int32, wrapping around."""
    left, right = (make.convert(x, I32) for x in op.operands)
    batch = [left.tile.shape[d] for d in op.batch[0]]
    free = [left.tile.shape[d] for d in op.free(0)], [right.tile.shape[d] for d in op.free(1)]
    inner = [left.tile.shape[d] for d in op.contract[0]]
    depth = prod(inner)
    whole = (*batch, *free[0], *free[1], depth)
    places = range(len(batch)), range(len(batch) + len(free[0]))
    sides: list[Value] = []
    for side, x, own in ((0, left, op.free(0)), (1, right, op.free(1))):
        order = (*op.batch[side], *own, *op.contract[side])
        flat = make.reshape(make.transpose(x, order), (*batch, *free[side], depth))
        first = len(places[side])
        dims = (*range(len(batch)), *range(first, first + len(free[side])), len(whole) - 1)
        sides.append(make.broadcast(flat, whole, dims))
    return make.reduce(make.of("mul", *sides), "sum", len(whole) - 1)
