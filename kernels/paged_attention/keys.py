"""The loop over the keys of a sequence, page by page: an online softmax for some rows of queries.

Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1): for each tile of keys, with
logits s, keep the running maximum m, the sum d = Σ exp(s - m) and the weighted values acc = Σ exp(s - m) v. When m
grows to m', both sums are scaled by exp(m - m'). Exponentials are powers of 2, and logits are in units of ln 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention.scores import LOG2_E
from tilekern.kernels.paged_attention.arguments import Cache, Settings, Tables, Terms


class Softmax(NamedTuple):
    """An online softmax so far, with a dim G of heads before the rows R unless G is 1.

    Attributes:
      largest: [G, R], the maximum of the logits, in units of ln 2.
      total: [G, R], the sum of the powers of 2.
      weighted: [G, R, Hv], the sum of the values.
    """

    largest: Any
    total: Any
    weighted: Any


class Keys(NamedTuple):
    """What rows of queries attend to.

    Attributes:
      cache: the pages, as refs.
      tables: the tables, as refs.
      terms: the scales and sinks, as refs.
      settings: the static arguments.
      g: the heads of the keys, a tile along K.
      block_k: the number of keys in a tile: a multiple of a page, or it divides one.
    """

    cache: Cache
    tables: Tables
    terms: Terms
    settings: Settings
    g: tk.Tile
    block_k: int

    @property
    def heads(self) -> Any:
        """The index of the heads in an array with a dim K: it drops the dim if the tile has one head."""
        return self.g.start if self.g.size == 1 else self.g

    def begin(self, rows: int, group: int, wide: Any, *, with_sinks: Any = True) -> Softmax:
        """The softmax of no keys for [G, rows], of the sinks alone where there are sinks and `with_sinks` holds.

        Row r is of head r % group of the queries that share a head of the keys.
        """
        lead = () if self.g.size == 1 else (self.g.size,)
        weighted = tk.zeros((*lead, rows, self.cache.width), wide)
        if self.terms.sinks is None:
            return Softmax(tk.full((*lead, rows), -jnp.inf, wide), tk.zeros((*lead, rows), wide), weighted)
        logits = self.terms.sinks[self.g * group].astype(wide).reshape(*lead, 1, group) * LOG2_E
        logits = jnp.broadcast_to(logits, (*lead, rows // group, group)).reshape(*lead, rows)
        logits = jnp.where(with_sinks, logits, -jnp.inf)
        return Softmax(logits, jnp.where(logits == -jnp.inf, wide.type(0), wide.type(1)), weighted)

    def attend(self, q: jax.Array, s: Any, positions: jax.Array, first: Any, last: Any, before: Softmax) -> Softmax:
        """Add the keys from `first` up to, not including, `last` of sequence s to a softmax.

        Args:
          q: [G, R, H], without the dim G if it is 1.
          s: the number of the sequence.
          positions: int32[R], the position of each row among the keys; -1 for rows that attend to nothing.
          first: the first key; a window may leave out some keys behind it for some rows.
          last: the end of the keys, unless the table ends before it.
          before: the softmax of earlier keys.
        """
        last = jnp.minimum(last, self._extent)
        # Without a bound of the scores one factor serves scale and units.
        factor = self.settings.scale * (LOG2_E if self.settings.softcap is None else 1.0)

        def step(j: tk.Tile, so_far: Softmax) -> Softmax:
            places, exists = self._places(s, j), (j.indices >= first) & (j.indices < last)
            keys, values = self._load(places)
            scores = tk.dot(q, jnp.swapaxes(keys.astype(q.dtype), -1, -2)) * factor
            scores = self._bounded(self._scaled(scores, self.terms.key_scale, places, exists))
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
            weights = self._scaled(powers, self.terms.value_scale, places, exists).astype(q.dtype)
            # A key behind the end has a weight of 0, but its values may be NaN.
            values = jnp.where(exists[:, None], values, 0).astype(q.dtype)
            return Softmax(largest, total, tk.dot(weights, values, so_far.weighted * shrink[..., None]))

        axis = tk.serial(self._extent, self.block_k, start=first, stop=last, whole_tiles=True)
        return tk.fold(axis, step, before)

    @property
    def _extent(self) -> int:
        return self.tables.pages.shape[1] * self.cache.page

    def _places(self, s: Any, j: tk.Tile) -> list[tuple[Any, Any]]:
        """Indices in the first two dims of the cache of the parts of a tile of keys."""
        page, pages = self.cache.page, self.tables.pages
        if self.block_k < page:
            return [(pages[s, j.start // page], tk.ds(j.start % page, self.block_k))]
        count = self.block_k // page
        if count > 1 and self.g.size == 1:
            return [(pages[s, j // page], slice(None))]  # one load of all pages
        return [(pages[s, j.index * count + n], slice(None)) for n in range(count)]

    def _load(self, places: Sequence[tuple[Any, Any]]) -> tuple[jax.Array, jax.Array]:
        """The keys [G, block_k, H] and values [G, block_k, Hv] of a tile, without the dim G if it is 1."""
        keys, values = self.cache
        if values is None and self.g.size == 1:
            pairs = keys.at[:, :, self.g * 2]
            return self._tile(pairs, places, 0), self._tile(pairs, places, 1)
        if values is None:
            pairs = _joined([keys[(*place, self.g * 2)] for place in places])
            pairs = jnp.swapaxes(pairs, 0, 1).reshape(self.g.size, 2, self.block_k, pairs.shape[-1])
            return pairs[:, 0], pairs[:, 1]
        return self._tile(keys, places, self.heads), self._tile(values, places, self.heads)

    def _tile(self, array: Any, places: Sequence[tuple[Any, Any]], heads: Any) -> jax.Array:
        """[G, block_k, H] of an array [pages, page, K, H]; without the dim G if `heads` is a number."""
        tile = _joined([array[(*place, heads)] for place in places])
        if not isinstance(heads, tk.Tile):
            return tile.reshape(self.block_k, tile.shape[-1])
        return jnp.swapaxes(tile.reshape(self.block_k, heads.size, tile.shape[-1]), 0, 1)

    def _scaled(self, numbers: jax.Array, scale: Any, places: Sequence[Any], exists: jax.Array) -> jax.Array:
        """[G, R, block_k] numbers, each multiplied by the scale of its key."""
        if scale is None:
            return numbers
        if scale.ndim == 3:
            tile = _joined([scale[(*place, self.heads)] for place in places])
            tile = tile.reshape(self.block_k, self.g.size).T
            tile = jnp.where(exists[None, :], tile, 0).astype(numbers.dtype)
            return numbers * (tile if self.g.size == 1 else tile[:, None, :])
        factor = scale[0 if scale.shape[0] == 1 else self.heads].astype(numbers.dtype)
        return numbers * (factor if factor.ndim == 0 else factor[:, None, None])

    def _bounded(self, scores: jax.Array) -> jax.Array:
        """Scores within the bound, in units of ln 2."""
        cap = self.settings.softcap
        return scores if cap is None else jnp.tanh(scores * (1 / cap)) * (cap * LOG2_E)


def _joined(tiles: Sequence[jax.Array]) -> jax.Array:
    """Tiles one after the other along their first dim, keys; a tile of several pages [n, page, ...] as it is."""
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles)
