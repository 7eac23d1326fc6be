"""Latents as keys and values: a product over the whole key, and the latent part as the value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.mla_attention.arguments import Latents, Scales, parts_of
from tilekern.kernels.paged_attention.keys import PagedKeys, joined


@dataclass(frozen=True)
class LatentKeys(PagedKeys):
    """Keys of C + R numbers, which all heads share; the first C numbers are the value.

    Attributes:
      cache: the pages, as refs.
      scales: as refs.
      value_width: C.
      block_c: the most columns of a part of a latent: parts are loaded, multiplied and summed up on their own.
    """

    cache: Latents
    scales: Scales
    value_width: int
    block_c: int

    @property
    def page(self) -> int:
        return self.cache.latent.shape[1]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(width for _, width in parts_of(self.value_width, self.block_c))

    def scores_and_values(
        self, q: Sequence[jax.Array], places: Sequence[tuple[Any, Any]], exists: jax.Array
    ) -> tuple[jax.Array, Callable[[], tuple[jax.Array, ...]]]:
        """A product for each part: GPUs pad a product over C + R = 576 numbers to 1024.

        The latents that are loaded for the scores are the values, too.
        """
        dtype = q[0].dtype
        *latents, ropes = (
            self._tile(array, columns, places, exists).astype(dtype)
            for array, columns in self.cache.columns(self.value_width, self.block_c)
        )
        scores = None
        for rows, keys in zip(q[:-1], latents, strict=True):
            scores = tk.dot(rows, keys.T, scores)
        if self.scales.latent is None and self.scales.rope is None:
            return tk.dot(q[-1], ropes.T, scores) * self.factor, lambda: tuple(latents)
        scores = self._scaled(cast(jax.Array, scores), self.scales.latent, places, exists)
        scores += self._scaled(tk.dot(q[-1], ropes.T), self.scales.rope, places, exists)
        return scores * self.factor, lambda: tuple(latents)

    def scaled_weights(self, weights: jax.Array, places: Sequence[tuple[Any, Any]], exists: jax.Array) -> jax.Array:
        return self._scaled(weights, self.scales.latent, places, exists)

    def _tile(self, array: Any, columns: Any, places: Sequence[tuple[Any, Any]], exists: jax.Array) -> jax.Array:
        """[block_k, ...] of columns of an array [pages, page, ...], 0 for keys that do not exist."""
        if len(places) > 1:
            tile = joined([array[(*place, columns)] for place in places])
            return jnp.where(exists[:, None], tile, 0)
        # A masked load goes straight into shared memory, a select through registers, of which GPUs have none to spare.
        shape = (-1, self.page, 1) if self.block_k > self.page else (-1, 1)
        tile = array.load((*places[0], columns), mask=exists.reshape(shape))
        return tile.reshape(self.block_k, tile.shape[-1])

    def _scaled(self, numbers: jax.Array, scale: Any, places: Sequence[Any], exists: jax.Array) -> jax.Array:
        """[R, block_k] numbers, each multiplied by the scale of its key."""
        if scale is None:
            return numbers
        if scale.ndim == 1:
            return numbers * scale[0].astype(numbers.dtype)
        tile = joined([scale[place] for place in places]).reshape(self.block_k)
        return numbers * jnp.where(exists, tile, 0).astype(numbers.dtype)[None, :]
