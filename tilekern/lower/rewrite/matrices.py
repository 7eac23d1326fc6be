"""Dots as products of matrices [M, K] and [K, N], or of stacks [B, M, K] and [B, K, N] of matrices.

The dims of each kind, batch, free and contracted, are brought together and merged. A target may take the contracted dim
first or last.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.ir.make import Make

Side = Literal[0, 1]
Dims = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def is_of_matrices(op: Dot) -> bool:
    """True if the operands are matrices, or stacks of matrices."""
    stacked = len(op.batch[0])
    front = tuple(range(stacked))
    one_dim = all(len(dims) == 1 for dims in op.contract)
    ranks = [len(x.tile.shape) for x in op.operands]
    return one_dim and stacked <= 1 and op.batch == (front, front) and ranks == [stacked + 2] * 2


def dims_of(op: Dot, side: Side) -> Dims:
    """The dims of an operand: (batch, free, contracted)."""
    return op.batch[side], op.free(side), op.contract[side]


def as_matrix(make: Make, x: Value, dims: Dims, contracted_last: bool, drop_one: bool = False) -> Value:
    """An operand as [B, free, contracted], or as [B, contracted, free]; without B if the dot has no batch.

    Args:
      make: adds ops.
      x: the operand.
      dims: its batch, free and contracted dims.
      contracted_last: the order of the last two dims.
      drop_one: leave out a batch of one, too.
    """
    batch, free, contracted = dims
    inner = (free, contracted) if contracted_last else (contracted, free)
    size, *sizes = (prod(x.tile.shape[d] for d in group) for group in (batch, *inner))
    front = () if not batch or (drop_one and size == 1) else (size,)
    return make.reshape(make.transpose(x, (*batch, *inner[0], *inner[1])), (*front, *sizes))


def product(op: Dot, left: Value, right: Value, contracted_last: tuple[bool, bool] = (True, False)) -> Dot:
    """The dot of its operands as matrices; its result is to be reshaped."""
    front = len(left.tile.shape) - 2
    first, second = contracted_last
    batch = tuple(range(front))
    contract = ((front + first,), (front + second,))
    return replace(op, operands=(left, right), contract=contract, batch=(batch, batch))
