"""The definitions in plain jnp: each token's keys are gathered; a write has one head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.index_scores.pages import KeyPages
from tilekern.kernels.paged_attention.reference import reference_places
from tilekern.kernels.paged_attention.reference import write_reference as paged_write_reference


def reference(
    query: jax.Array,
    head_weights: jax.Array,
    key_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
    dtype: Any = None,
) -> jax.Array:
    """The result of `index_scores`, computed in `dtype`; None stands for float32, or float64 for float64 queries."""
    wide = dtype or jnp.promote_types(query.dtype, jnp.float32)
    tokens, (pages, page) = query.shape[0], key_pages.shape[:2]
    page_indices = jnp.asarray(page_indices)
    sequence, position = reference_places(tokens, kv_lens, cu_q_lens, num_seqs)
    sees = (sequence >= 0)[:, None] & (jnp.arange(page_indices.shape[1] * page) <= position[:, None])

    scale = jnp.asarray(1.0 if key_scale is None else key_scale, wide)
    keys = key_pages.reshape(pages, page, -1).astype(wide) * (scale[..., None] if scale.ndim == 2 else scale)
    table = page_indices[sequence]
    inside = (table >= 0) & (table < pages)
    tiles = jnp.where(inside[..., None, None], keys[jnp.where(inside, table, 0)], 0).reshape(tokens, -1, keys.shape[2])
    products = jnp.einsum("tjd,tnd->tjn", query.astype(wide), jnp.where(sees[..., None], tiles, 0))
    return jnp.where(sees, jnp.einsum("tj,tjn->tn", head_weights.astype(wide), jax.nn.relu(products)), -jnp.inf)


def select_reference(
    query: jax.Array,
    head_weights: jax.Array,
    key_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    num_keys: int = 2048,
    key_scale: jax.Array | float | None = None,
    dtype: Any = None,
) -> jax.Array:
    """The result of `select_keys` by a stable sort of the scores, computed in `dtype`."""
    tables = kv_lens, page_indices, cu_q_lens, num_seqs
    scores = reference(query, head_weights, key_pages, *tables, key_scale=key_scale, dtype=dtype)
    order = jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)[:, :num_keys]
    selected = jnp.where(jnp.take_along_axis(scores, order, axis=1) == -jnp.inf, -1, order)
    return jnp.pad(selected, ((0, 0), (0, num_keys - selected.shape[1])), constant_values=-1)


def write_reference(
    key_pages: jax.Array,
    new_keys: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
    dtype: Any = None,
) -> KeyPages:
    """The result of `write_index_keys`: each place of the cache looks for its token, among all tokens.

    It quantises in `dtype`; None stands for float32, or float64 for float64 keys.
    """
    tables = kv_lens, page_indices, cu_q_lens, num_seqs
    head, rows = key_pages.reshape(*key_pages.shape[:2], 1, -1), new_keys[:, None]
    is_of_keys = getattr(key_scale, "ndim", 0) == 2
    of_head: Any = jnp.asarray(key_scale)[..., None] if is_of_keys else key_scale
    written = paged_write_reference((head, head), rows, rows, *tables, key_scale=of_head, dtype=dtype)
    after = written.key_scale[..., 0] if is_of_keys else key_scale
    return KeyPages(written.kv_pages[0].reshape(key_pages.shape), after)
