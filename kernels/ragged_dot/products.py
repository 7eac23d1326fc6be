"""The tiles of grouped products of numbers that may have scales; all kernels of this folder fold these tiles.

Numbers of 8 bits are multiplied in their own dtype if both operands have it, otherwise in the wider operand's dtype,
which has all numbers of both. Sums over a block of numbers that share their scales are multiplied by the scales in
float32:

    out[m, n] = Σ_b lhs_scale[m, b] rhs_scale[g, b, n] Σ_{k in block b} lhs[m, k] rhs[g, k, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.checks import is_float


@dataclass(frozen=True)
class Operands:
    """The refs of a grouped product.

    Attributes:
      lhs: [M, K].
      rhs: matrices [G, K, N], or [G, N, K] with `transpose_rhs`.
      lhs_scale: float32[M, B], for B blocks of the inner dim; None for ones.
      rhs_scales: for each matrix float32[G, B, C] for C blocks of columns, also with `transpose_rhs`; None for ones.
        B may be 1, even if B of another scale is not.
      transpose_rhs: multiply by the transposed matrices.
    """

    lhs: tk.Ref
    rhs: tuple[tk.Ref, ...]
    lhs_scale: tk.Ref | None
    rhs_scales: tuple[tk.Ref | None, ...]
    transpose_rhs: bool

    @property
    def columns(self) -> int:
        """N."""
        return self.rhs[0].shape[1 if self.transpose_rhs else 2]

    @property
    def dtype(self) -> Any:
        """The dtype in which numbers are multiplied."""
        return multiplied(self.lhs.dtype, self.rhs[0].dtype)

    @property
    def wide(self) -> Any:
        """The dtype of the products."""
        return widened(self.lhs.dtype, self.rhs[0].dtype)

    @property
    def blocks(self) -> int:
        """The largest B, the number of blocks of the inner dim with scales of their own; 1 without scales."""
        return max((s.shape[1] for s in (self.lhs_scale, *self.rhs_scales) if s is not None), default=1)


def multiplied(lhs: Any, rhs: Any) -> Any:
    """The dtype in which numbers of two dtypes are multiplied; it has all numbers of dtypes of 8 or 4 bits."""
    if lhs == rhs and lhs not in (jnp.int4, jnp.float4_e2m1fn):
        return lhs
    for dtype in (lhs, rhs):
        if is_float(jax.ShapeDtypeStruct((), dtype)):
            return dtype
    both_integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (lhs, rhs))
    return jnp.dtype(jnp.int8 if both_integers else jnp.bfloat16)


def widened(lhs: Any, rhs: Any) -> Any:
    """The float dtype of products of two dtypes: float32, or float64."""
    return jnp.promote_types(multiplied(lhs, rhs), jnp.float32) if jnp.float64 in (lhs, rhs) else jnp.dtype(jnp.float32)


def products(
    operands: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, stop: Any, block_k: int
) -> tuple[jax.Array, ...]:
    """The products of tile i of the rows with tile j of the columns of each matrix of group g.

    `stop` is the inner dim, or 0 for a group that is not needed.
    """
    if operands.blocks == 1:
        return _of_one_block(operands, i, j, g, stop, block_k)
    inner = operands.lhs.shape[1]
    depth, parts = cut(inner // operands.blocks, operands.blocks, block_k)

    def step(k: tk.Tile, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for part in range(parts):
            at = tk.tile(inner, depth, k.index * parts + part) if parts > 1 else k
            block = at.index // (inner // operands.blocks // depth)
            parts_of_sums = _dots(operands, i, j, g, at, (None,) * len(sums))
            parts_of_sums = _scaled(operands, i, j, g, block, parts_of_sums)
            sums = tuple(a + b for a, b in zip(sums, parts_of_sums, strict=True))
        return sums

    tiles = tk.serial(inner, depth * parts, stop=stop, whole_tiles=True)
    return tk.fold(tiles, step, tuple(tk.zeros((i, j), operands.wide) for _ in operands.rhs))


def cut(size: int, blocks: int, block_k: int) -> tuple[int, int]:
    """(terms of a product, products of a tile): a product lies in a block of `size`, a tile in `block_k` terms."""
    if size <= block_k:
        return size, max(n for n in range(1, block_k // size + 1) if blocks % n == 0)
    return max(n for n in range(1, block_k + 1) if size % n == 0), 1


def _of_one_block(
    operands: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, stop: Any, block_k: int
) -> tuple[jax.Array, ...]:
    def step(k: tk.Tile, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return _dots(operands, i, j, g, k, sums)

    needed = tk.serial(operands.lhs.shape[1], block_k, stop=stop, whole_tiles=True)
    zero = tk.zeros((i, j), tk.accumulator(operands.dtype))
    return _scaled(operands, i, j, g, 0, tk.fold(needed, step, (zero,) * len(operands.rhs)))


def _dots(
    operands: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, k: tk.Tile, sums: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, ...]:
    left = operands.lhs[i, k].astype(operands.dtype)
    matrices = (w[g, j, k].T if operands.transpose_rhs else w[g, k, j] for w in operands.rhs)
    return tuple(tk.dot(left, matrix.astype(operands.dtype), acc) for matrix, acc in zip(matrices, sums, strict=True))


def _scaled(
    operands: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, block: Any, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The sums of block number `block`, times the block's scales."""

    def place(scale: tk.Ref) -> Any:
        return block // (operands.blocks // scale.shape[1]) if scale.shape[1] > 1 else 0

    sums = tuple(x.astype(operands.wide) for x in sums)
    if operands.lhs_scale is not None:
        of_rows = operands.lhs_scale[i, place(operands.lhs_scale)].astype(operands.wide)
        sums = tuple(x * of_rows[:, None] for x in sums)

    def by_columns(x: jax.Array, scale: tk.Ref | None) -> jax.Array:
        if scale is None:
            return x
        if scale.shape[2] == 1:
            return x * scale[g, place(scale), 0].astype(operands.wide)
        return x * _of_columns(scale.at[g, place(scale)], j, operands.columns // scale.shape[2]).astype(operands.wide)

    return tuple(by_columns(x, scale) for x, scale in zip(sums, operands.rhs_scales, strict=True))


def _of_columns(scale: tk.Ref, j: tk.Tile, size: int) -> jax.Array:
    """The scales of the columns of tile j, [1, columns], or a scalar for all; `size` columns share a scale."""
    if size % j.size == 0:
        return scale[j.index // (size // j.size)]
    if size == 1:
        return scale[j][None]
    return (jnp.repeat(scale[j // size], size) if j.size % size == 0 else scale[j.indices // size])[None]
