"""The definition of paged attention, in plain jnp: each token's keys are gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.kernels.paged_attention.arguments import Pages
from tilekern.kernels.quantization import LARGEST
from tilekern.kernels.rope import reference as rope_reference


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
    cache_dtype: str | None = None,
    new_keys: jax.Array | None = None,
    new_values: jax.Array | None = None,
    return_logsumexp: bool = False,
    dtype: Any = None,
) -> jax.Array | tuple[Any, ...]:
    """The result of `ragged_paged_attention`, or without `cu_q_lens` of `paged_attention`, computed in `dtype`.

    `dtype` None stands for float32, or float64 for float64 queries. It takes the memory of all keys for each token.
    """
    if new_keys is not None and new_values is not None:
        tables = kv_lens, page_indices, cu_q_lens, num_seqs
        scales: dict[str, Any] = {"key_scale": key_scale, "value_scale": value_scale, "cache_dtype": cache_dtype}
        pages = write_reference(kv_pages, new_keys, new_values, *tables, **scales)
        terms: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "cache_dtype": cache_dtype,
            **pages._asdict(),
        }
        out = reference(query, terms.pop("kv_pages"), *tables, **terms, return_logsumexp=return_logsumexp, dtype=dtype)
        return (*out, pages) if return_logsumexp else (out, pages)
    wide = dtype or jnp.promote_types(query.dtype, jnp.float32)
    keys, values = _keys_and_values(kv_pages, cache_dtype)
    (tokens, heads, width), page = query.shape, keys.shape[1]
    sequence, position = reference_places(tokens, kv_lens, cu_q_lens, num_seqs)
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


def write_reference(
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    new_keys: jax.Array,
    new_values: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
    value_scale: jax.Array | float | None = None,
    cache_dtype: str | None = None,
    theta: float | None = None,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    dtype: Any = None,
) -> Pages:
    """The result of `write_pages`: each place of the cache looks for its token, among all tokens.

    It quantises in `dtype`; None stands for float32, or float64 for float64 keys.
    """
    wide = dtype or jnp.promote_types(new_keys.dtype, jnp.float32)
    is_pair = isinstance(kv_pages, (tuple, list))
    keys, values = cast(Sequence[jax.Array], kv_pages if is_pair else (kv_pages, kv_pages))
    pages, page = keys.shape[:2]
    stored_dtype = keys.dtype if cache_dtype is None else jnp.dtype(cache_dtype)
    tokens, page_indices = new_keys.shape[0], jnp.asarray(page_indices)
    sequence, position = reference_places(tokens, kv_lens, cu_q_lens, num_seqs)
    exists = (sequence >= 0) & (position >= 0) & (position < page_indices.shape[1] * page)
    if theta is not None or frequencies is not None:
        rotation: dict[str, Any] = {"theta": theta or 10000.0, "frequencies": frequencies, "interleaved": interleaved}
        new_keys = rope_reference(new_keys[None], jnp.maximum(position, 0)[None], **rotation)[0]
    number = page_indices[sequence, jnp.clip(position // page, 0, page_indices.shape[1] - 1)]
    here = (number == jnp.arange(pages)[:, None, None]) & (position % page == jnp.arange(page)[:, None]) & exists

    def placed(pool: jax.Array, rows: jax.Array) -> jax.Array:
        """The pool [pages, page, ...] with the rows [T, ...] of the tokens."""
        is_written = here.any(axis=2).reshape(pages, page, *(1,) * (rows.ndim - 1))
        return jnp.where(is_written, rows[here.argmax(axis=2)], pool)

    def stored(new: jax.Array, scale: Any) -> tuple[jax.Array, Any]:
        """New keys or values in the dtype of the cache, and the scales with theirs."""
        largest = LARGEST.get(stored_dtype.name, jnp.inf)
        factor, after = jnp.asarray(1.0 if scale is None else scale, wide), scale
        if scale is not None and factor.ndim == 3:
            of_tokens = (jnp.abs(new.astype(wide)).max(axis=2) / largest).astype(scale.dtype)
            after = placed(scale, jnp.where(of_tokens < 2.0**-126, 1, of_tokens))
            factor = jnp.where(of_tokens < 2.0**-126, 1, of_tokens).astype(wide)
        scaled = new.astype(wide) / (factor[..., None] if factor.size > 1 else factor.reshape(()))
        scaled = jnp.round(scaled) if stored_dtype.name.startswith("int") else scaled
        return jnp.clip(scaled, -largest, largest).astype(stored_dtype), after

    (of_keys, key_scale), (of_values, value_scale) = stored(new_keys, key_scale), stored(new_values, value_scale)
    if is_pair:
        return Pages((placed(keys, of_keys), placed(values, of_values)), key_scale, value_scale)
    if cache_dtype is not None:
        pairs = jax.lax.bitcast_convert_type(jnp.stack([of_keys, of_values], axis=3), jnp.uint8)
    else:
        pairs = jnp.stack([of_keys, of_values], axis=2).reshape(tokens, -1, of_keys.shape[2])
    return Pages(placed(keys, pairs), key_scale, value_scale)


def reference_places(
    tokens: int, kv_lens: Any, cu_q_lens: Any | None, num_seqs: Any | None
) -> tuple[jax.Array, jax.Array]:
    """Integers [T] twice: the sequence of each token, -1 for none, and the token's place among its sequence's keys.

    Each token looks through all sequences. The place of a token of no sequence has no meaning.
    """
    kv_lens = jnp.asarray(kv_lens)
    sequences, t = kv_lens.shape[0], jnp.arange(tokens)
    starts = jnp.arange(sequences + 1) if cu_q_lens is None else jnp.asarray(cu_q_lens)
    count = sequences if num_seqs is None else jnp.asarray(num_seqs).reshape(())
    of_sequence = (t[:, None] >= starts[:-1]) & (t[:, None] < starts[1:]) & (jnp.arange(sequences) < count)
    sequence = jnp.where(of_sequence.any(axis=1), of_sequence.argmax(axis=1), -1)
    return sequence, t - starts[sequence + 1] + kv_lens[sequence]


def _keys_and_values(kv_pages: Any, cache_dtype: str | None) -> Sequence[jax.Array]:
    """The keys [pages, page, K, H] and the values [pages, page, K, Hv] of a cache of any form."""
    if isinstance(kv_pages, (tuple, list)):
        return cast(Sequence[jax.Array], kv_pages)
    if cache_dtype is None:
        return kv_pages[:, :, ::2], kv_pages[:, :, 1::2]
    pairs = jax.lax.bitcast_convert_type(kv_pages, jnp.dtype(cache_dtype))
    return pairs[..., 0], pairs[..., 1]
