"""Dots of dtypes that `tl.dot` does not multiply."""

from __future__ import annotations

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.types import BF16, F16, F32, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.matrices import as_matrix, dims_of
from tilekern.lower.triton.chip import Chip


def expand_dot(make: Make, op: Dot, chip: Chip) -> Value | None:
    """A dot of other operands; None for a dot that Triton has.

    Integers other than int8 become a sum of products. Float32 with the precision "bf16" becomes bfloat16. 8-bit floats
    become float16, which has all their numbers, on GPUs whose tensor cores do not multiply them, or not exactly: wgmma
    sums products of 8-bit floats in fewer bits than float32 has, and Triton has no wgmma that does not.
    """
    dtype = op.operands[0].tile.dtype
    if dtype == F32 and op.precision == "bf16":
        return _converted(make, op, BF16)
    if is_float8(dtype) and (not chip.float8 or chip.matrix_unit == "wgmma"):
        return _converted(make, op, F16)
    if kind_of(dtype) == "float" or dtype == np.dtype(np.int8):
        return None
    return _sum_of_products(make, op)


def _converted(make: Make, op: Dot, dtype: DType) -> Value:
    lhs, rhs = (make.convert(x, dtype) for x in op.operands)
    return make.add(Dot, lhs, rhs, contract=op.contract, batch=op.batch)


def _sum_of_products(make: Make, op: Dot) -> Value:
    """All products at once, summed along the contracted dims; int32, which wraps around."""
    sides = [as_matrix(make, make.convert(op.operands[n], I32), dims_of(op, n), contracted_last=True) for n in (0, 1)]
    front = len(sides[0].tile.shape) - 2
    (*batch, rows, depth), columns = sides[0].tile.shape, sides[1].tile.shape[-2]
    whole, stack = (*batch, rows, columns, depth), tuple(range(front))
    left, right = (make.broadcast(x, whole, (*stack, front + n, front + 2)) for n, x in enumerate(sides))
    return make.reshape(make.reduce(make.of("mul", left, right), "sum", front + 2), op.result.tile.shape)
