"""The loop over the keys of a sequence, page by page: an online softmax for some rows of queries.

Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1): for each tile of keys, with
logits s, keep the running maximum m, the sum d = Σ exp(s - m) and the weighted values acc = Σ exp(s - m) v. When m
grows to m', both sums are scaled by exp(m - m'). Exponentials are powers of 2, and logits are in units of ln 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention.scores import LN_2, LOG2_E
from tilekern.kernels.paged_attention.arguments import Cache, Settings, Tables, Terms


class Softmax(NamedTuple):
    """An online softmax so far, with a dim G of heads before the rows R unless G is 1.

    Attributes:
      largest: [G, R], the maximum of the logits, in units of ln 2.
      total: [G, R], the sum of the powers of 2.
      weighted: [G, R, Hv], the sum of the values; or a tuple of such sums, of parts of a value.
    """

    largest: Any
    total: Any
    weighted: Any

    def result(self) -> tuple[Any, jax.Array]:
        """(values [G, R, Hv], logsumexp [G, R], a natural logarithm); for no keys (0, -inf)."""
        total = jnp.where(self.total == 0, 1, self.total)[..., None]

        def divided(weighted: jax.Array) -> jax.Array:
            return weighted / total

        return jax.tree.map(divided, self.weighted), (self.largest + jnp.log2(self.total)) * self.total.dtype.type(LN_2)


class Span(NamedTuple):
    """The keys that rows of queries may attend to.

    Attributes:
      positions: int32[R], the position of each row among the keys; -1 for rows that attend to nothing.
      first: the first key; a window may leave out some keys behind it for some rows.
      last: the end of the keys, unless the table ends before it.
    """

    positions: jax.Array
    first: Any
    last: Any


@dataclass(frozen=True)
class PagedKeys(ABC):
    """What rows of queries attend to: keys and values in pages, in any form of cache.

    Attributes:
      tables: the tables, as refs.
      settings: the static arguments.
      block_k: the number of keys in a tile: a multiple of a page, or it divides one.
      block_p: the number of pages in a load, which holds all pages of a tile, or one.
    """

    tables: Tables
    settings: Settings
    block_k: int
    block_p: int

    @property
    @abstractmethod
    def page(self) -> int:
        """The number of keys in a page."""

    @property
    @abstractmethod
    def widths(self) -> int | tuple[int, ...]:
        """Hv, the elements of a value; or of each part of a value."""

    @property
    def lead(self) -> tuple[int, ...]:
        """The dims before the rows of a tile of scores: (G,), or () if G is 1."""
        return ()

    @abstractmethod
    def scores_and_values(
        self, q: Any, places: Sequence[tuple[Any, Any]], exists: jax.Array
    ) -> tuple[jax.Array, Callable[[], Any]]:
        """The dot products [G, R, block_k] of rows with a tile of keys, times all scales; the values [G, block_k, Hv].

        Values come by a function, which is called behind the softmax: before it, GPUs have no registers to spare.

        Args:
          q: the rows, as in `attend`.
          places: of the parts of the tile, indices in the first two dims of the cache.
          exists: bool[block_k]; keys that do not exist may hold anything. Their values must be 0.
        """

    @abstractmethod
    def scaled_weights(self, weights: jax.Array, places: Sequence[tuple[Any, Any]], exists: jax.Array) -> jax.Array:
        """Weights [G, R, block_k] of a tile of values, each multiplied by the scale of its value."""

    def begin(self, rows: int, wide: Any) -> Softmax:
        """The softmax of no keys for [G, rows]."""
        shape = (*self.lead, rows)

        def zeros(width: int) -> jax.Array:
            return tk.zeros((*shape, width), wide)

        return Softmax(tk.full(shape, -jnp.inf, wide), tk.zeros(shape, wide), jax.tree.map(zeros, self.widths))

    def of_tile(self, i: tk.Tile, s: Any, heads: int) -> Span:
        """The span of a tile of tokens in sequence s, -1 for none: rows t heads, ..., (t + 1) heads - 1 are of token t.

        Rows of tokens of other sequences attend to nothing.
        """
        begin, end = self.tables.starts[s], self.tables.starts[s + 1]
        shift = self.tables.lengths[s] - end
        mine = (i.indices >= begin) & (i.indices < end) & (s >= 0)
        positions = jnp.where(mine, i.indices + shift, -1)
        first, last = jnp.int32(0), jnp.where(s >= 0, jnp.minimum(i.stop, end) + shift, 0)
        if self.settings.window is not None:
            first = jnp.maximum(jnp.maximum(i.start, begin) + shift - self.settings.window + 1, 0)
        return Span(jnp.broadcast_to(positions[:, None], (i.size, heads)).reshape(-1), first, last)

    def of_part(self, s: Any, part: Any, *, few: int, parts: int, heads: int) -> Span:
        """The span of a part of the keys of sequence s, whole tiles of keys: row t heads + n is of its token t.

        Rows behind its last token, and all rows of a sequence of more than `few` tokens, attend to nothing.
        """
        length, tokens = self.tables.lengths[s], self.tables.starts[s + 1] - self.tables.starts[s]
        tokens = jnp.where((s < self.tables.count[0]) & (tokens <= few), tokens, 0)
        t = jnp.arange(few * heads, dtype=jnp.int32) // heads
        positions = jnp.where(t < tokens, length - tokens + t, -1)
        first, last = jnp.int32(0), jnp.where(tokens > 0, length, 0)
        if self.settings.window is not None:
            first = jnp.maximum(length - tokens - self.settings.window + 1, 0)
        skipped = first // self.block_k
        tiles = tk.cdiv(tk.cdiv(jnp.maximum(last, first), self.block_k) - skipped, parts)
        begin = (skipped + part * tiles) * self.block_k
        return Span(positions, jnp.maximum(first, begin), jnp.minimum(last, begin + tiles * self.block_k))

    def attend(self, q: Any, s: Any, span: Span, before: Softmax) -> Softmax:
        """Add the keys of a span of sequence s to a softmax.

        Args:
          q: [G, R, H], without the dim G if it is 1; or what `scores_and_values` takes.
          s: the number of the sequence.
          span: of the rows.
          before: the softmax of earlier keys.
        """
        positions, first, last = span.positions, span.first, jnp.minimum(span.last, self._extent)

        def step(j: tk.Tile, so_far: Softmax) -> Softmax:
            places, exists = self._places(s, j), (j.indices >= first) & (j.indices < last)
            scores, values = self.scores_and_values(q, places, exists)
            scores = self._bounded(scores)
            attends = exists[None, :] & (j.indices[None, :] <= positions[:, None])
            if self.settings.window is not None:
                attends &= j.indices[None, :] > positions[:, None] - self.settings.window
            scores = jnp.where(attends, scores, -jnp.inf)
            largest = jnp.maximum(so_far.largest, scores.max(axis=-1))
            # A row that has seen no key yet: exp2(-inf - 0) = 0, where -inf - -inf would be NaN.
            base = jnp.where(largest == -jnp.inf, 0, largest)
            powers = jnp.exp2(scores - base[..., None])
            shrink = jnp.exp2(so_far.largest - base)
            total = so_far.total * shrink + powers.sum(axis=-1)
            weights = self.scaled_weights(powers, places, exists)

            def added(values: jax.Array, weighted: jax.Array) -> jax.Array:
                return tk.dot(weights.astype(values.dtype), values, weighted * shrink[..., None])

            return Softmax(largest, total, jax.tree.map(added, values(), so_far.weighted))

        axis = tk.serial(self._extent, self.block_k, start=first, stop=last, whole_tiles=True)
        return tk.fold(axis, step, before)

    @property
    def factor(self) -> float:
        """The factor of dot products: scale · log2(e), which gives units of ln 2; with a softcap the scale alone."""
        return self.settings.scale * (LOG2_E if self.settings.softcap is None else 1.0)

    @property
    def _extent(self) -> int:
        return self.tables.pages.shape[1] * self.page

    def _places(self, s: Any, j: tk.Tile) -> list[tuple[Any, Any]]:
        """Indices in the first two dims of the cache of the parts of a tile of keys."""
        return places_of_tile(self.tables.pages, s, j, self.page, 1 if self.lead else self.block_p)

    def _bounded(self, scores: jax.Array) -> jax.Array:
        """Scores within the bound, in units of ln 2."""
        cap = self.settings.softcap
        return scores if cap is None else jnp.tanh(scores * (1 / cap)) * (cap * LOG2_E)


@dataclass(frozen=True)
class Keys(PagedKeys):
    """Keys and values of heads, in one array or two.

    Attributes:
      cache: the pages, as refs.
      terms: the scales and sinks, as refs.
      g: the heads of the keys, a tile along K.
    """

    cache: Cache
    terms: Terms
    g: tk.Tile

    @property
    def page(self) -> int:
        return self.cache.page

    @property
    def widths(self) -> int:
        return self.cache.width

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.g.size == 1 else (self.g.size,)

    @property
    def heads(self) -> Any:
        """The index of the heads in an array with a dim K: it drops the dim if the tile has one head."""
        return self.g.start if self.g.size == 1 else self.g

    def begin_with_sinks(self, rows: int, group: int, wide: Any, *, with_sinks: Any = True) -> Softmax:
        """The softmax of no keys for [G, rows], of the sinks alone where there are sinks and `with_sinks` holds.

        Row r is of head r % group of the queries that share a head of the keys.
        """
        nothing = self.begin(rows, wide)
        if self.terms.sinks is None:
            return nothing
        logits = self.terms.sinks[self.g * group].astype(wide).reshape(*self.lead, 1, group) * LOG2_E
        logits = jnp.broadcast_to(logits, (*self.lead, rows // group, group)).reshape(*self.lead, rows)
        logits = jnp.where(with_sinks, logits, -jnp.inf)
        return Softmax(logits, jnp.where(logits == -jnp.inf, wide.type(0), wide.type(1)), nothing.weighted)

    def scores_and_values(
        self, q: jax.Array, places: Sequence[tuple[Any, Any]], exists: jax.Array
    ) -> tuple[jax.Array, Callable[[], jax.Array]]:
        keys, values = self._load(places)
        scores = tk.dot(q, jnp.swapaxes(keys.astype(q.dtype), -1, -2)) * self.factor
        scores = self._scaled(scores, self.terms.key_scale, places, exists)
        if self.settings.cache_dtype is not None:
            return scores, lambda: values().astype(q.dtype)
        # A key behind the end has a weight of 0, but its values may be NaN, unlike numbers of 4 bits.
        return scores, lambda: jnp.where(exists[:, None], values(), 0).astype(q.dtype)

    def scaled_weights(self, weights: jax.Array, places: Sequence[tuple[Any, Any]], exists: jax.Array) -> jax.Array:
        return self._scaled(weights, self.terms.value_scale, places, exists)

    def _load(self, places: Sequence[tuple[Any, Any]]) -> tuple[jax.Array, Callable[[], jax.Array]]:
        """The keys [G, block_k, H] of a tile and a function of its values [G, block_k, Hv]; without a dim G of 1."""
        keys, values = self.cache
        if self.settings.cache_dtype is not None:
            pairs = self._tile(keys, places, self.heads)
            return four_bits_of(pairs, self.settings.cache_dtype, 0), partial(
                four_bits_of, pairs, self.settings.cache_dtype, 1
            )
        if values is None and self.g.size == 1:
            pairs = keys.at[:, :, self.g * 2]
            loaded = self._tile(pairs, places, 0), self._tile(pairs, places, 1)
        elif values is None:
            pairs = joined([keys[(*place, self.g * 2)] for place in places])
            pairs = jnp.swapaxes(pairs, 0, 1).reshape(self.g.size, 2, self.block_k, pairs.shape[-1])
            loaded = pairs[:, 0], pairs[:, 1]
        else:
            loaded = self._tile(keys, places, self.heads), self._tile(values, places, self.heads)
        return loaded[0], lambda: loaded[1]

    def _tile(self, array: Any, places: Sequence[tuple[Any, Any]], heads: Any) -> jax.Array:
        """[G, block_k, H] of an array [pages, page, K, H]; without the dim G if `heads` is a number."""
        tile = joined([array[(*place, heads)] for place in places])
        if not isinstance(heads, tk.Tile):
            return tile.reshape(self.block_k, tile.shape[-1])
        return jnp.swapaxes(tile.reshape(self.block_k, heads.size, tile.shape[-1]), 0, 1)

    def _scaled(self, numbers: jax.Array, scale: Any, places: Sequence[Any], exists: jax.Array) -> jax.Array:
        """[G, R, block_k] numbers, each multiplied by the scale of its key."""
        if scale is None:
            return numbers
        if scale.ndim == 3:
            tile = joined([scale[(*place, self.heads)] for place in places])
            tile = tile.reshape(self.block_k, self.g.size).T
            tile = jnp.where(exists[None, :], tile, 0).astype(numbers.dtype)
            return numbers * (tile if self.g.size == 1 else tile[:, None, :])
        factor = scale[0 if scale.shape[0] == 1 else self.heads].astype(numbers.dtype)
        return numbers * (factor if factor.ndim == 0 else factor[:, None, None])


def places_of_tile(pages: Any, s: Any, j: tk.Tile, page: int, block_p: int) -> list[tuple[Any, Any]]:
    """Indices in the first two dims of a cache of the parts of tile j of the keys of sequence s.

    Args:
      pages: the table [S, P], a ref.
      s: the number of the sequence.
      j: a tile of whole pages, or of a part of one.
      page: the number of keys in a page.
      block_p: the most pages that one load takes at places of a vector.
    """
    if j.size < page:
        return [(pages[s, j.start // page], tk.ds(j.start % page, j.size))]
    count = j.size // page
    if 1 < count <= block_p:
        return [(pages[s, j // page], slice(None))]
    return [(pages[s, j.index * count + n], slice(None)) for n in range(count)]


def four_bits_of(pairs: jax.Array, dtype: str, half: int) -> jax.Array:
    """The numbers [...] of a 4-bit `dtype` in the low (0) or high (1) halves of bytes [...]: (0x3F, "int4", 1) -> 3."""
    return jax.lax.index_in_dim(jax.lax.bitcast_convert_type(pairs, dtype), half, axis=-1, keepdims=False)


def joined(tiles: Sequence[jax.Array]) -> jax.Array:
    """The tiles, concatenated along their first dim. A single tile stays as it is, also if it is [n, page, ...]."""
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles)
