"""Keys that each token selects, as a table of pages of one key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.paged_attention.arguments import Tables
from tilekern.kernels.paged_attention.op import positions_of


def tables_of_selected(tables: Tables, selected: jax.Array, cache: Any) -> Tables:
    """Tables in which each token is a sequence, and the keys that it selects are its pages, in the order of the cache.

    Args:
      tables: of the sequences.
      selected: int32[T, k], positions of keys in the sequence of each token; a position that the token does not see
        counts for nothing.
      cache: the array [pages, page, ...], of which row page_indices[s, n // page] * page + n % page is key n of
        sequence s.
    """
    tokens, (pages, page) = selected.shape[0], cache.shape[:2]
    sequence, position = positions_of(tables, tokens)
    number = selected // page
    exists = (sequence >= 0)[:, None] & (selected >= 0) & (selected <= position[:, None])
    exists &= number < tables.pages.shape[1]
    in_table = tables.pages[sequence[:, None], jnp.where(exists, number, 0)]
    # A page that is not in the cache has latents of 0, as has a row behind the cache.
    row = jnp.where((in_table >= 0) & (in_table < pages), in_table * page + selected % page, pages * page)
    last = jnp.iinfo(jnp.int32).max
    rows = jnp.sort(jnp.where(exists, row, last), axis=1)
    lengths = exists.sum(axis=1, dtype=jnp.int32)
    starts = jnp.arange(tokens + 1, dtype=jnp.int32)
    return Tables(starts, lengths, rows, jnp.full(1, tokens, jnp.int32))
