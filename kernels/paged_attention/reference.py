"""The definition of paged attention, in plain jnp: each token's keys are gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp


def reference(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | float | None = None,
    value_scale: jax.Array | float | None = None,
    return_logsumexp: bool = False,
    dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The result of `ragged_paged_attention`, or without `cu_q_lens` of `paged_attention`, computed in `dtype`.

    `dtype` None stands for float32, or float64 for float64 queries. It takes the memory of all keys for each token.
    """
    wide = dtype or jnp.promote_types(query.dtype, jnp.float32)
    is_pair = isinstance(kv_pages, (tuple, list))
    pair: Any = kv_pages if is_pair else (kv_pages[:, :, ::2], kv_pages[:, :, 1::2])
    keys, values = cast(Sequence[jax.Array], pair)
    (tokens, heads, width), page = query.shape, keys.shape[1]
    starts = jnp.arange(tokens + 1) if cu_q_lens is None else jnp.asarray(cu_q_lens)
    count = kv_lens.shape[0] if num_seqs is None else jnp.asarray(num_seqs).reshape(())
    exists = jnp.arange(kv_lens.shape[0]) < count
    t = jnp.arange(tokens)[:, None]
    of_sequence = (t >= starts[:-1]) & (t < starts[1:]) & exists
    sequence = jnp.where(of_sequence.any(axis=1), of_sequence.argmax(axis=1), -1)
    position = jnp.arange(tokens) - starts[sequence + 1] + kv_lens[sequence]
    number = jnp.arange(page_indices.shape[1] * page)
    attends = (sequence >= 0)[:, None] & (number <= position[:, None])
    if window is not None:
        attends &= number > position[:, None] - window

    def gathered(pages: jax.Array, scale: Any) -> jax.Array:
        """[T, P page, N, width] of pages [pages, page, K, width], with zeros where a token does not attend."""
        scale = jnp.asarray(1.0 if scale is None else scale, wide)
        pages = pages.astype(wide) * (scale[..., None] if scale.ndim else scale)
        tile = pages[page_indices[sequence]].reshape(tokens, -1, *pages.shape[2:])
        return jnp.repeat(jnp.where(attends[:, :, None, None], tile, 0), heads // pages.shape[2], axis=2)

    scores = jnp.einsum("tnh,tsnh->tns", query.astype(wide), gathered(keys, key_scale))
    scores = scores * (1 / math.sqrt(max(width, 1)) if scale is None else scale)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(attends[:, None, :], scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks.astype(wide)[:, None], (tokens, heads, 1))], axis=2)
    logsumexp = jax.nn.logsumexp(scores, axis=2)
    weights = jnp.exp(scores - jnp.where(logsumexp == -jnp.inf, 0, logsumexp)[..., None])
    weights = jnp.where(sequence[:, None, None] >= 0, weights, 0)
    out = jnp.einsum("tns,tsnh->tnh", weights[..., : number.size], gathered(values, value_scale)).astype(query.dtype)
    return (out, jnp.where(sequence[:, None] >= 0, logsumexp, -jnp.inf)) if return_logsumexp else out
