"""Dots of [B, M, K] and [B, K, N] or [B, N, K] (no B where there is no batch), of the dtypes of `gemm.dots.KINDS`."""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Transpose
from tilekern.ir.types import BF16, F32, F64, I32, DType, kind_of
from tilekern.lower.llvm.gemm import gemv
from tilekern.lower.llvm.legalize.casts import cast
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.make import Make

I16 = np.dtype(np.int16)


def unit(dtype: DType, precision: str, machine: Machine, rows: int) -> DType:
    """The dtype in which operands are multiplied; pairs of neighbours have to be copied, which few rows do not pay."""
    if kind_of(dtype) != "float":
        fits = dtype.itemsize <= 2 and dtype != np.dtype(np.uint16)
        return I16 if rows > gemv.ROWS and machine.has_int16_pairs and fits else I32
    if dtype == F64:
        return F64
    halved = dtype == BF16 or (dtype == F32 and precision == "bf16")
    return BF16 if rows > gemv.ROWS and halved and machine.has_bfloat16_dots else F32


def expand_dot(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value | None:
    """A dot in this form; None if it has it already."""
    rows, columns = (prod(op.operands[side].tile.shape[d] for d in op.free(side)) for side in (0, 1))
    if columns == 1 and rows > 1:
        return _turned(make, op, machine, rewriter)
    dtype = unit(op.operands[0].tile.dtype, op.precision, machine, rows)
    moved = any(isinstance(rewriter.definition(x), Transpose) for x in op.operands)
    if is_canonical(op) and op.operands[0].tile.dtype == dtype and not moved:
        return None
    (left, over_left), (right, over_right) = (_side(make, op, side, dtype, rewriter) for side in (0, 1))
    batch = ((0,), (0,)) if op.batch[0] else ((), ())
    found = make.add(Dot, left, right, contract=((over_left,), (over_right,)), batch=batch)
    return make.reshape(found, op.result.tile.shape)


def _turned(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value:
    """A product with one column as one with one row; their elements lie alike."""
    (left, right), (over_left, over_right), (batch_left, batch_right) = op.operands, op.contract, op.batch
    other = Dot(
        operands=(right, left),
        contract=(over_right, over_left),
        batch=(batch_right, batch_left),
        precision=op.precision,
        loc=op.loc,
    )
    (found,) = rewriter.visit(other)
    return make.reshape(found, op.result.tile.shape)


def is_canonical(op: Dot) -> bool:
    """Whether a dot is of matrices, or of stacks of matrices."""
    stacked = op.batch == ((0,), (0,))
    ranks = {len(x.tile.shape) for x in op.operands}
    return ranks == {2 + stacked} and (stacked or op.batch == ((), ())) and len(op.contract[0]) == 1


def _side(make: Make, op: Dot, side: Literal[0, 1], dtype: DType, rewriter: Rewriter) -> tuple[Value, int]:
    """One operand as [B, free, contracted] or [B, contracted, free], whichever it is already; the contracted dim."""
    x = op.operands[side]
    groups = [op.batch[side], op.free(side), op.contract[side]]
    while isinstance(moved := rewriter.definition(x), Transpose):
        x = moved.operands[0]
        groups = [tuple(moved.permutation[d] for d in group) for group in groups]
    batches, free, contract = groups
    lengths = [prod(x.tile.shape[d] for d in group) for group in groups]
    first = 1 if batches else 0
    inner_first = bool(free) and (*batches, *contract, *free) == tuple(range(len(x.tile.shape)))
    order, sizes = (*batches, *free, *contract), lengths[1:]
    if inner_first:
        order, sizes = (*batches, *contract, *free), lengths[:0:-1]
    matrix = make.reshape(make.transpose(x, order), (*lengths[:first], *sizes))
    return cast(make, matrix, dtype), first + (not inner_first)
