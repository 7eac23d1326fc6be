"""Block maps: the tiles of the score matrix that a mask does not empty, found once and used by many calls.

A tile is full (no element is masked: the mask need not be read), partial, or dead (all elements are masked: the tile
need not be computed). After FlexAttention's BlockMask, Dong et al. 2024, https://arxiv.org/abs/2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, static_int, takes_python_numbers
from tilekern.errors import ArgumentError

hide_frames(__file__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMap:
    """The live tiles of keys of each tile of queries, and the reverse for the backward pass; made by `block_map`.

    All arrays are int32; B and N are 1 where the mask is the same for the whole batch, or for all heads. The numbers of
    tiles are sorted: the full tiles in ascending order, then the partial tiles in ascending order, then zeros.

    Attributes:
      keys_of: [B, N, tiles of queries, tiles of keys], the numbers of the live tiles of keys.
      full_keys: [B, N, tiles of queries], the count of full tiles of keys.
      live_keys: [B, N, tiles of queries], the count of live tiles of keys, full or partial.
      queries_of: [B, N, tiles of keys, tiles of queries], the numbers of the live tiles of queries.
      full_queries: [B, N, tiles of keys], the count of full tiles of queries.
      live_queries: [B, N, tiles of keys], the count of live tiles of queries, full or partial.
      block_q: queries of a tile.
      block_k: keys of a tile.
    """

    keys_of: jax.Array
    full_keys: jax.Array
    live_keys: jax.Array
    queries_of: jax.Array
    full_queries: jax.Array
    live_queries: jax.Array
    block_q: int = field(metadata={"static": True})
    block_k: int = field(metadata={"static": True})

    def along(self, dim: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The numbers of the live tiles of "keys" or "queries", and the counts of full and of live tiles."""
        if dim == "keys":
            return self.keys_of, self.full_keys, self.live_keys
        return self.queries_of, self.full_queries, self.live_queries

    def block(self, dim: str) -> int:
        """The number of "keys" or "queries" of a tile of the map."""
        return self.block_k if dim == "keys" else self.block_q

    def parts(self, dim: str, block: int) -> int:
        """The number of a kernel's tiles, of `block` keys or queries each, in one tile of the map.

        Raises:
          ArgumentError: a tile of the kernel would lie in two tiles of the map.
        """
        if self.block(dim) % block == 0:
            return self.block(dim) // block
        raise ArgumentError(
            "a block of flash_attention does not divide that of its block map",
            expected=f"a divisor of {self.block(dim)} {dim}",
            got=f"a block of {block} {dim}",
            fix="leave the block out, or make a block_map of tiles that it divides",
        )


@takes_python_numbers
def block_map(
    mask: jax.Array | Callable[..., Any],
    *,
    queries: int | None = None,
    keys: int | None = None,
    batch: int = 1,
    heads: int = 1,
    block_q: int = 128,
    block_k: int = 128,
) -> BlockMap:
    """The map of the tiles of the score matrix that a mask does not empty.

    A `mask_mod` is evaluated for `block_q` rows at a time. It works under `jax.jit`, too.

    Args:
      mask: bool[B|1, N|1, T|1, S|1], True = attend; or a `mask_mod`, a function of int32 arrays (b, n, i, j) that
        broadcast against each other, with bool results. It may be a `jax.tree_util.Partial` of arrays.
      queries: T; for an array only needed where its dim is 1.
      keys: S; for an array only needed where its dim is 1.
      batch: B, of a function that depends on b.
      heads: N, of a function that depends on n.
      block_q: queries of a tile, in elements.
      block_k: keys of a tile, in elements.

    Returns:
      A `BlockMap`, for any number of calls with this mask.

    Raises:
      tilekern.errors.ArgumentError: the mask is not of bools or has other sizes, `queries` or `keys` are missing, or a
        size is not a static integer, of at least 1 for blocks.

    Example:
      >>> from tilekern.kernels.flash_attention import block_map
      >>> causal = block_map(lambda b, n, i, j: j <= i, queries=384, keys=384)
      >>> causal.live_keys
      Array([[[1, 2, 3]]], dtype=int32)
      >>> causal.full_keys
      Array([[[0, 1, 2]]], dtype=int32)
      >>> causal.keys_of[0, 0, 2]
      Array([0, 1, 2], dtype=int32)
    """
    blocks = static_int(block_q, "block_q", 1), static_int(block_k, "block_k", 1)
    lengths = _length(queries, "queries"), _length(keys, "keys")
    copies = static_int(batch, "batch", 0), static_int(heads, "heads", 0)
    states = _of_function(mask, *copies, *lengths, *blocks) if callable(mask) else _of_array(mask, *lengths, *blocks)
    return cast(BlockMap, jax.jit(_sorted, static_argnums=(1, 2))(states, *blocks))


def _length(value: int | None, name: str) -> int | None:
    return None if value is None else static_int(value, name, 0)


def _sorted(states: jax.Array, block_q: int, block_k: int) -> BlockMap:
    return BlockMap(*_numbers(states), *_numbers(states.swapaxes(2, 3)), block_q, block_k)


def _numbers(states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers of the live tiles along the last dim, the count of full tiles, and the count of live tiles."""
    full, live = (jnp.sum(states >= least, axis=-1, dtype=jnp.int32) for least in (2, 1))
    order = jnp.argsort(-states, axis=-1, stable=True).astype(jnp.int32)
    ranks = jnp.arange(states.shape[-1], dtype=jnp.int32)
    return jnp.where(ranks < live[..., None], order, 0), full, live


def _states(mask: jax.Array, block_q: int, block_k: int) -> jax.Array:
    """0 for the dead tiles of bool[..., T, S], 1 for the partial ones and 2 for the full ones."""
    rows, columns = mask.shape[-2:]
    tiles = tk.cdiv(rows, block_q), tk.cdiv(columns, block_k)
    padding = [(0, 0)] * (mask.ndim - 2) + [(0, tiles[0] * block_q - rows), (0, tiles[1] * block_k - columns)]
    # Repeated rows and columns do not change whether any element, or all elements, of a tile attend.
    padded = jnp.pad(mask, padding, mode="edge")
    tiled = padded.reshape(*mask.shape[:-2], tiles[0], block_q, tiles[1], block_k)
    return jnp.any(tiled, axis=(-3, -1)).astype(jnp.int32) + jnp.all(tiled, axis=(-3, -1))


def _of_array(mask: Any, queries: int | None, keys: int | None, block_q: int, block_k: int) -> jax.Array:
    shape: tuple[int, ...] = getattr(mask, "shape", ())
    fits = getattr(mask, "dtype", None) == jnp.bool_ and len(shape) == 4
    lengths = queries, keys
    if not fits or not all(n in (1, size) or size is None for n, size in zip(shape[2:], lengths, strict=True)):
        raise ArgumentError(
            "the mask of block_map does not fit",
            expected="bool[B|1, N|1, T|1, S|1] of the given sizes, or a function of (b, n, i, j)",
            got=f"mask = {describe(mask)}, queries = {queries}, keys = {keys}",
            fix="make it with a comparison, and reshape its leading dims into one",
        )
    states = cast(jax.Array, jax.jit(_states, static_argnums=(1, 2))(mask, block_q, block_k))
    # Along a dim of size 1 all tiles are alike.
    rows, columns = (
        tk.cdiv(size if length is None else length, block)
        for size, length, block in zip(shape[2:], lengths, (block_q, block_k), strict=True)
    )
    return jnp.broadcast_to(states, (*shape[:2], rows, columns))


def _of_function(
    mask_mod: Callable[..., Any],
    batch: int,
    heads: int,
    queries: int | None,
    keys: int | None,
    block_q: int,
    block_k: int,
) -> jax.Array:
    if queries is None or keys is None:
        raise ArgumentError(
            "block_map of a function needs the lengths",
            expected="queries = T and keys = S",
            got=f"queries = {queries}, keys = {keys}",
            fix="pass query.shape[-3] and key.shape[-3]",
        )
    if isinstance(mask_mod, jax.tree_util.Partial):
        mask_mod = jax.tree.map(_as_array, mask_mod)
    tiles = tk.cdiv(queries, block_q)
    j = jnp.arange(keys, dtype=jnp.int32)[None, :]
    _check_function(mask_mod, block_q, j)

    def of_tile(number: jax.Array) -> jax.Array:
        b, n, tile = jnp.unravel_index(number, (batch, heads, tiles))
        i = tile * block_q + jnp.arange(block_q, dtype=jnp.int32)[:, None]
        # The last row is repeated, as in `_states`: the function need not know positions that do not exist.
        attends = mask_mod(b, n, jnp.minimum(i, queries - 1), j)
        return _states(jnp.broadcast_to(attends, (block_q, keys)), block_q, block_k)

    states = jnp.asarray(jax.lax.map(of_tile, jnp.arange(batch * heads * tiles, dtype=jnp.int32)))
    return states.reshape(batch, heads, tiles, tk.cdiv(keys, block_k))


def _as_array(leaf: Any) -> jax.Array:
    """A leaf as a JAX array, because NumPy's arrays cannot be indexed with traced integers."""
    return jnp.asarray(leaf)


def _check_function(mask_mod: Callable[..., Any], block_q: int, j: jax.Array) -> None:
    scalar, i = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (block_q, 1)))
    result: Any = jax.eval_shape(mask_mod, scalar, scalar, i, j)
    shape: tuple[int, ...] = getattr(result, "shape", ())
    broadcasts = len(shape) <= 2 and all(a in (1, b) for a, b in zip(shape[::-1], (j.size, block_q), strict=False))
    if getattr(result, "dtype", None) == jnp.bool_ and broadcasts:
        return
    raise ArgumentError(
        "the mask_mod of block_map does not return a mask",
        expected=f"bool of a shape that broadcasts to [{block_q}, {j.size}], as its arguments do",
        got=f"mask_mod(b, n, i, j) = {describe(result)}",
        fix="return a comparison, or .astype(bool)",
    )
