"""The definition of `mla_attention`: paged attention of one head of keys, whose first numbers are the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.kernels.mla_attention.arguments import LatentPages, Latents
from tilekern.kernels.paged_attention.reference import reference as paged_reference
from tilekern.kernels.paged_attention.reference import reference_places
from tilekern.kernels.paged_attention.reference import write_reference as paged_write_reference


def reference(
    query: jax.Array | tuple[jax.Array, jax.Array],
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    scale: float,
    value_width: int = 512,
    latent_scale: jax.Array | float | None = None,
    rope_scale: jax.Array | float | None = None,
    selected: jax.Array | None = None,
    new_latents: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    return_logsumexp: bool = False,
    dtype: Any = None,
) -> jax.Array | tuple[Any, ...]:
    """The result of `mla_attention`, computed in `dtype`; None stands for float32, or float64 for float64 queries.

    It takes the memory of all keys for each token.
    """
    tables = kv_lens, page_indices, cu_q_lens, num_seqs
    pages = None
    if new_latents is not None:
        scales: dict[str, Any] = {"latent_scale": latent_scale, "rope_scale": rope_scale}
        pages = write_reference(kv_pages, new_latents, *tables, value_width=value_width, **scales)
        kv_pages, latent_scale, rope_scale = pages
    of_query = jnp.concatenate(_halves(query, value_width), axis=-1)
    wide = dtype or jnp.promote_types(of_query.dtype, jnp.float32)
    scaled: list[jax.Array] = []
    for half, factor in zip(_halves(kv_pages, value_width), (latent_scale, rope_scale), strict=True):
        factor = jnp.asarray(1.0 if factor is None else factor, wide)
        factor = factor[..., None] if factor.ndim == 2 else factor.reshape(())
        scaled.append(half.reshape(*half.shape[:2], -1).astype(wide) * factor)
    pair = jnp.concatenate(scaled, axis=-1)[:, :, None], scaled[0][:, :, None]
    flag: dict[str, Any] = {"scale": scale, "return_logsumexp": return_logsumexp}
    if selected is None:
        results = paged_reference(of_query, pair, *tables, **flag, dtype=wide)
    else:
        results = _of_selected(of_query, pair, tables, selected, **flag)
    if pages is None:
        return results
    return (*results, pages) if isinstance(results, tuple) else (results, pages)


def _of_selected(
    query: jax.Array, pair: Sequence[jax.Array], tables: Any, selected: Any, *, scale: float, return_logsumexp: bool
) -> Any:
    """The attention of each token to the keys at `selected` positions that it sees, in the dtype of the pair."""
    kv_lens, page_indices, cu_q_lens, num_seqs = tables
    page_indices, selected = jnp.asarray(page_indices), jnp.asarray(selected)
    keys, values = (x.reshape(-1, x.shape[-1]) for x in pair)
    pages, page = pair[0].shape[:2]
    sequence, position = reference_places(query.shape[0], kv_lens, cu_q_lens, num_seqs)
    sees = (sequence >= 0)[:, None] & (selected >= 0) & (selected <= position[:, None])
    sees &= selected < page_indices.shape[1] * page
    number = page_indices[sequence[:, None], jnp.where(sees, selected // page, 0)]
    in_cache = (sees & (number >= 0) & (number < pages))[..., None]
    row = jnp.where(in_cache[..., 0], number * page + selected % page, 0)

    of_tokens = jnp.where(in_cache, keys[row], 0), jnp.where(in_cache, values[row], 0)
    scores = jnp.einsum("tnh,tkh->tnk", query.astype(keys.dtype), of_tokens[0]) * scale
    scores = jnp.where(sees[:, None], scores, -jnp.inf)
    logsumexp = jax.nn.logsumexp(scores, axis=2) if selected.shape[1] else jnp.full(query.shape[:2], -jnp.inf)
    weights = jnp.exp(scores - jnp.where(logsumexp == -jnp.inf, 0, logsumexp)[..., None])
    out = jnp.einsum("tnk,tkh->tnh", weights, of_tokens[1]).astype(query.dtype)
    return (out, logsumexp) if return_logsumexp else out


def write_reference(
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    new_latents: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    value_width: int = 512,
    latent_scale: jax.Array | float | None = None,
    rope_scale: jax.Array | float | None = None,
    theta: float | None = None,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    dtype: Any = None,
) -> LatentPages:
    """The result of `write_latents`: latents are written as keys of one head, and rotated keys as keys of another.

    It quantises in `dtype`; None stands for float32, or float64 for float64 latents.
    """
    tables = kv_lens, page_indices, cu_q_lens, num_seqs
    rotation: dict[str, Any] = {"theta": theta, "frequencies": frequencies, "interleaved": interleaved}
    pools: list[jax.Array] = []
    scales: list[Any] = []
    halves = zip(
        _halves(kv_pages, value_width), _halves(new_latents, value_width), (latent_scale, rope_scale), strict=True
    )
    for is_rope, (pool, rows, factor) in enumerate(halves):
        is_of_keys = getattr(factor, "ndim", 0) == 2
        of_head: Any = jnp.asarray(factor)[..., None] if is_of_keys else factor
        head = pool.reshape(*pool.shape[:2], 1, -1)
        keywords: dict[str, Any] = {"key_scale": of_head, "dtype": dtype, **(rotation if is_rope else {})}
        written = paged_write_reference((head, head), rows[:, None], rows[:, None], *tables, **keywords)
        pools.append(written.kv_pages[0].reshape(pool.shape))
        scales.append(written.key_scale[..., 0] if is_of_keys else factor)
    is_pair = isinstance(kv_pages, (tuple, list))
    return LatentPages(tuple(pools) if is_pair else jnp.concatenate(pools, axis=-1), *scales)


def _halves(arrays: Any, value_width: int) -> tuple[jax.Array, jax.Array]:
    pair = cast(Sequence[Any], arrays if isinstance(arrays, (tuple, list)) else (arrays, None))
    return Latents(*pair).halves(value_width)
