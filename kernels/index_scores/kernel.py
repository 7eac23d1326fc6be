"""The kernel: the scores of a tile of keys for one token, whose heads are the rows of a product."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.paged_attention.keys import joined, places_of_tile


class Places(NamedTuple):
    """The keys of each token.

    Attributes:
      sequences: int32[T], the sequence of each token; any one for a token of none.
      positions: int32[T], the last key that the token sees; negative for none.
      pages: int32[S, P], the pages of each sequence in the order of its keys.
    """

    sequences: Any
    positions: Any
    pages: Any


def _type_of_scores(query: Any, weights: Any, keys: Any, scale: Any, places: Places) -> jax.ShapeDtypeStruct:
    columns = places.pages.shape[1] * keys.shape[1]
    return jax.ShapeDtypeStruct((query.shape[0], columns), tk.accumulator(query.dtype))


@tk.kernel(out_type=_type_of_scores)
def scores_of_keys(
    query: tk.Ref,
    weights: tk.Ref,
    keys: tk.Ref,
    scale: tk.Ref | None,
    places: Places,
    out: tk.Ref,
    *,
    block_k: tk.Block = 128,
    block_p: tk.Block = 256,
) -> None:
    """query[T, J, D], weights[T, J], keys[pages, page, D] -> out[T, P page]; -inf for keys that a token does not see.

    Keys that no token of a sequence sees may hold anything: each key gives one column of a product. A program of none
    but such keys loads nothing.
    """
    t = tk.parallel(query.shape[0])
    j = tk.parallel(out.shape[1], block_k)
    s, position = places.sequences[t], places.positions[t]

    def scores() -> jax.Array:
        parts = places_of_tile(places.pages, s, j, keys.shape[1], block_p)
        rows = query[t]
        tile = joined([keys[part] for part in parts]).reshape(block_k, keys.shape[2])
        products = tk.dot(rows, tile.astype(rows.dtype).T)
        if scale is not None:
            factors = scale[0] if scale.ndim == 1 else joined([scale[part] for part in parts]).reshape(1, block_k)
            products *= factors.astype(products.dtype)
        return (jnp.maximum(products, 0) * weights[t].astype(products.dtype)[:, None]).sum(axis=0)

    def nothing() -> jax.Array:
        return tk.full(block_k, -jnp.inf, out.dtype)

    sums = jax.lax.cond(j.start <= position, scores, nothing)
    out[t, j] = jnp.where(j.indices <= position, sums, -jnp.inf)
