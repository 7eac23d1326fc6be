"""Dots of dtypes that `tl.dot` does not take."""

from __future__ import annotations

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.ir.types import BF16, F16, F32, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.matrices import as_matrix, dims_of
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
    sides = [as_matrix(make, make.convert(op.operands[n], I32), dims_of(op, n), contracted_last=True) for n in (0, 1)]
    front = len(sides[0].tile.shape) - 2
    (*batch, rows, depth), columns = sides[0].tile.shape, sides[1].tile.shape[-2]
    whole, stack = (*batch, rows, columns, depth), tuple(range(front))
    left, right = (make.broadcast(x, whole, (*stack, front + n, front + 2)) for n, x in enumerate(sides))
    return make.reshape(make.reduce(make.of("mul", left, right), "sum", front + 2), op.result.tile.shape)
