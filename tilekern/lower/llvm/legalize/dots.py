"""Bring dots to [B, M, K] and [B, K, N] or [B, N, K], or without B, of the dtypes that the matrix loops multiply."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.compute import Constant, Convert, Dot, Select
from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, F32, F64, I32, DType, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.byte_functions import function_of_bytes
from tilekern.lower.llvm.gemm.fours import BYTES
from tilekern.lower.llvm.legalize.exact_casts import before_exact_cast
from tilekern.lower.llvm.legalize.pairs import dot_of_pairs
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.matrices import Side, as_matrix, dims_of, is_of_matrices, product

I16 = np.dtype(np.int16)


def unit(dtype: DType, precision: str, machine: Machine, rows: int, is_stored: bool = False) -> DType:
    """The dtype in which operands are multiplied.

    Products of words and of tiles need operands copied into words. Few rows do not pay for the copies, but pairs of
    bfloat16 that lie in memory (`is_stored`) become words in registers.
    """
    few = rows <= calibration.MAX_GEMV_ROWS
    if few and is_stored and dtype == BF16 and machine.has_bfloat16_dots:
        return BF16
    if kind_of(dtype) != "float":
        if (machine.has_int8_tiles or machine.has_int8_fours) and dtype in BYTES and not few:
            return dtype
        fits = dtype.itemsize <= 2 and dtype != np.dtype(np.uint16)
        return I16 if machine.has_int16_pairs and fits and not few else I32
    if dtype == F64:
        return F64
    # All floats of 8 bits are bfloat16 numbers.
    halved = dtype == BF16 or dtype.itemsize == 1 or (dtype == F32 and precision == "bf16")
    return BF16 if machine.multiplies_bfloat16 and halved and not few else F32


def expand_dot(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value | None:
    """A dot in the form of this module; None if `op` has the form already."""
    rows, columns = (prod(op.operands[side].tile.shape[d] for d in op.free(side)) for side in (0, 1))
    if columns == 1 and rows > 1:
        return _turned(make, op, machine, rewriter)
    dtype = unit(op.operands[0].tile.dtype, op.precision, machine, rows, _is_stored(op.operands[1], rows, rewriter))
    if rows <= calibration.MAX_GEMV_ROWS and (of_pairs := dot_of_pairs(make, op, rewriter)):
        return of_pairs
    moved = any(isinstance(rewriter.definition(x), Transpose) for x in op.operands)
    if is_of_matrices(op) and op.operands[0].tile.dtype == dtype and not moved:
        return None
    (left, left_last), (right, right_last) = (_matrix(make, op, side, dtype, rewriter) for side in (0, 1))
    matrix_dot = product(replace(op, precision="ieee"), left, right, (left_last, right_last))
    return make.reshape(rewriter.one(matrix_dot), op.result.tile.shape)


def _is_stored(x: Value, rows: int, rewriter: Rewriter) -> bool:
    """True if the elements of x are elements of tiles in memory, moved or selected, or functions of halves of bytes.

    For two rows or more they may be cast from 8 bits: one row multiplies them faster in float32.
    """
    function = function_of_bytes(x, rewriter.definition)
    if function is not None and function.leaf is not x and function.half() is not None:
        return _is_stored(function.leaf, rows, rewriter)
    match rewriter.definition(x):
        case Load() | Constant() | None:
            return True
        case (Transpose() | Reshape() | Broadcast() | Slice()) as op:
            return _is_stored(op.operands[0], rows, rewriter)
        case Convert(operands=(y,)) if y.tile.dtype.itemsize == 1 and y.tile.dtype != BOOL and rows > 1:
            return _is_stored(y, rows, rewriter)
        case Select() as op:
            return all(_is_stored(v, rows, rewriter) for v in op.operands[1:])
        case _:
            return False


def _turned(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value:
    """A product with one column as a product with one row; the elements have the same order."""
    (left, right), (over_left, over_right), (batch_left, batch_right) = op.operands, op.contract, op.batch
    swapped = Dot(
        operands=(right, left),
        contract=(over_right, over_left),
        batch=(batch_right, batch_left),
        precision=op.precision,
        loc=op.loc,
    )
    (turned,) = rewriter.visit(swapped)
    return make.reshape(turned, op.result.tile.shape)


def _matrix(make: Make, op: Dot, side: Side, dtype: DType, rewriter: Rewriter) -> tuple[Value, bool]:
    """An operand as a matrix in the order in which it lies, before any transposition; True if it is contracted last."""
    x, dims = op.operands[side], dims_of(op, side)
    while isinstance(moved := rewriter.definition(x), Transpose):
        x = moved.operands[0]
        batch, free, contracted = (tuple(moved.permutation[d] for d in group) for group in dims)
        dims = batch, free, contracted
    batch, free, contracted = dims
    last = not free or (*batch, *contracted, *free) != tuple(range(len(x.tile.shape)))
    return make.convert(as_matrix(make, before_exact_cast(x, rewriter, dtype), dims, last), dtype), last
