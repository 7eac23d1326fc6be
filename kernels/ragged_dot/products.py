"""The tiles of grouped products, of numbers that may have scales: what all kernels of this folder fold.

Numbers of 8 bits are multiplied as such where both operands have one dtype, otherwise in the dtype of the wider one,
which has all of them. Sums over a block of numbers that share their scales are multiplied by these in float32:

    out[m, n] = Σ_b lhs_scale[m, b] rhs_scale[g, b, n] Σ_{k in block b} lhs[m, k] rhs[g, k, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.api import is_float


@dataclass(frozen=True)
class Operands:
    """The refs of a product.

    Attributes:
      lhs: [M, K].
      rhs: matrices [G, K, N], or [G, N, K] with `transpose_rhs`.
      lhs_scale: float32[M, B], for B blocks of the inner dim; None for ones.
      rhs_scales: of each of rhs, float32[G, B, C] for C blocks of columns, also with `transpose_rhs`; None for ones.
        Any B may be 1.
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
        """The number of blocks of the inner dim: sums of different blocks are multiplied by different scales."""
        return max((s.shape[1] for s in (self.lhs_scale, *self.rhs_scales) if s is not None), default=1)


def multiplied(lhs: Any, rhs: Any) -> Any:
    """The dtype in which numbers of two dtypes are multiplied: it has all numbers of both, if one has 8 or 4 bits."""
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


def products(given: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, stop: Any, block_k: int) -> tuple[jax.Array, ...]:
    """The products of tile i of the rows with tile j of the columns of each matrix of group g.

    `stop` is the inner dim, or 0 for a group that is not needed.
    """
    if given.blocks == 1:
        return _of_one_block(given, i, j, g, stop, block_k)
    inner = given.lhs.shape[1]
    depth, parts = cut(inner // given.blocks, given.blocks, block_k)

    def step(k: tk.Tile, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for part in range(parts):
            at = tk.tile(inner, depth, k.index * parts + part) if parts > 1 else k
            block = at.index // (inner // given.blocks // depth)
            found = _dots(given, i, j, g, at, (None,) * len(sums))
            found = _scaled(given, i, j, g, block, found)
            sums = tuple(a + b for a, b in zip(sums, found, strict=True))
        return sums

    tiles = tk.serial(inner, depth * parts, stop=stop, whole_tiles=True)
    return tk.fold(tiles, step, tuple(tk.zeros((i, j), given.wide) for _ in given.rhs))


def cut(size: int, blocks: int, block_k: int) -> tuple[int, int]:
    """The terms of a product within a block of `size`, and the number of such products in a tile of `block_k`."""
    if size <= block_k:
        return size, max(n for n in range(1, block_k // size + 1) if blocks % n == 0)
    return max(n for n in range(1, block_k + 1) if size % n == 0), 1


def _of_one_block(
    given: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, stop: Any, block_k: int
) -> tuple[jax.Array, ...]:
    def step(k: tk.Tile, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return _dots(given, i, j, g, k, sums)

    needed = tk.serial(given.lhs.shape[1], block_k, stop=stop, whole_tiles=True)
    zero = tk.zeros((i, j), tk.accumulator(given.dtype))
    return _scaled(given, i, j, g, 0, tk.fold(needed, step, (zero,) * len(given.rhs)))


def _dots(
    given: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, k: tk.Tile, sums: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, ...]:
    left = given.lhs[i, k].astype(given.dtype)
    matrices = (w[g, j, k].T if given.transpose_rhs else w[g, k, j] for w in given.rhs)
    return tuple(tk.dot(left, matrix.astype(given.dtype), acc) for matrix, acc in zip(matrices, sums, strict=True))


def _scaled(
    given: Operands, i: tk.Tile, j: tk.Tile, g: jax.Array, block: Any, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Sums of the given block times its scales."""

    def place(scale: tk.Ref) -> Any:
        return block // (given.blocks // scale.shape[1]) if scale.shape[1] > 1 else 0

    sums = tuple(x.astype(given.wide) for x in sums)
    if given.lhs_scale is not None:
        of_rows = given.lhs_scale[i, place(given.lhs_scale)].astype(given.wide)
        sums = tuple(x * of_rows[:, None] for x in sums)

    def by_columns(x: jax.Array, scale: tk.Ref | None) -> jax.Array:
        if scale is None:
            return x
        if scale.shape[2] == 1:
            return x * scale[g, place(scale), 0].astype(given.wide)
        return x * _of_columns(scale.at[g, place(scale)], j, given.columns // scale.shape[2]).astype(given.wide)

    return tuple(by_columns(x, scale) for x, scale in zip(sums, given.rhs_scales, strict=True))


def _of_columns(scale: tk.Ref, j: tk.Tile, size: int) -> jax.Array:
    """The scales of the columns of tile j, of which `size` share one: [1, columns], or one for all of them."""
    if size % j.size == 0:
        return scale[j.index // (size // j.size)]
    if size == 1:
        return scale[j][None]
    return (jnp.repeat(scale[j // size], size) if j.size % size == 0 else scale[j.indices // size])[None]
