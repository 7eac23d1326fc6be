"""The public functions: checks, and calls without tokens or keys."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.paged_attention import checks
from tilekern.kernels.paged_attention.arguments import Pages
from tilekern.kernels.paged_attention.op import decode_op, paged_attention_op
from tilekern.kernels.paged_attention.pages import write_pages
from tilekern.kernels.symbolic_rows import over_rows

hide_frames(__file__)


@overload
def ragged_paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array | int | None = None,
    *,
    new_keys: None = None,
    return_logsumexp: Literal[False] = False,
    **options: Any,
) -> jax.Array: ...
@overload
def ragged_paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array | int | None = None,
    *,
    new_keys: None = None,
    return_logsumexp: Literal[True],
    **options: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ragged_paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array | int | None = None,
    *,
    new_keys: jax.Array,
    **options: Any,
) -> tuple[Any, ...]: ...
@takes_python_numbers
def ragged_paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
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
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array | tuple[Any, ...]:
    """Causal softmax attention of the tokens of many sequences to a cache of keys and values in pages.

    The tokens of the sequences stand one after the other: prompts, chunks of prompts and single tokens that are decoded
    go into one call. Sequence s has the tokens cu_q_lens[s], ..., cu_q_lens[s + 1] - 1, its last ones, and kv_lens[s]
    keys. The keys of the tokens count; they are in the cache already, or are `new_keys`. Key n of the sequence is key
    n % page of page page_indices[s, n // page]. A token attends to the keys up to its own. Scores and sums are in
    float32 (float64 for float64). Source: PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180.

    Args:
      query: [T, N, H], float32, bfloat16, float16 or float64.
      kv_pages: [pages, page, 2 K, H], with the keys of head g at 2 g and its values at 2 g + 1; or a pair of keys
        [pages, page, K, H] and values [pages, page, K, Hv]. Of the query's dtype, int8, float8_e4m3fn or float8_e5m2;
        or with `cache_dtype` uint8[pages, page, K, H]. K divides N. The cache is read in place.
      kv_lens: integers [S], from 0. Keys behind the last page of the table do not exist.
      page_indices: integers [S, P]. Entries that no key needs may hold anything; a page that is not in the cache has
        keys and values of 0.
      cu_q_lens: integers [S + 1], ascending from 0, up to T at most.
      num_seqs: the number of sequences, an int or an integer array of shape () or (1,); S if None. Entries of tables
        from this number on may hold anything.
      scale: of the dot products; H ** -0.5 if None.
      window: a token attends to so many keys, its own included; None for all up to its own.
      softcap: if given, a bound of the scores, softcap tanh(score / softcap).
      sinks: float [N]: logits that take part in each row's softmax, but have no value.
      key_scale: what keys are multiplied by: a number, or floats of shape () for all, [K] for each head, or [pages,
        page, K] for each head of each key. None for 1.
      value_scale: the same for values.
      cache_dtype: "int4" or "float4_e2m1fn", for a cache of bytes. The low half of byte (g, h) of a key is number h of
        the key of head g, the high half number h of its value, so H may be odd, and no array of 4-bit numbers is
        copied: `jax.lax.bitcast_convert_type(jnp.stack([keys, values], axis=-1), jnp.uint8)` makes such bytes.
      new_keys: [T, K, H]: the keys of the tokens, which `write_pages` puts into the cache first.
      new_values: [T, K, Hv], with `new_keys`.
      return_logsumexp: return (out, logsumexp), to merge parts of sequences.
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: `few`: sequences of up to so many tokens have programs of their own, one for each of `parts` parts of
        the keys; `block_q`: tokens of a tile of the other sequences. No block changes the result beyond rounding.

    Returns:
      out[T, N, Hv] in the query's dtype; tokens of no sequence, and tokens without keys, are 0. With `return_logsumexp`
      also the logsumexp of a token's scores (natural logarithm), [T, N] in float32 (float64 for float64), -inf for such
      tokens. With `new_keys`, last, also the result of `write_pages`: the cache after the write, with its scales.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.paged_attention import ragged_paged_attention
      >>> query, pages = jnp.ones((6, 4, 32)), jnp.ones((8, 16, 2 * 2, 32))
      >>> lengths, table = jnp.array([30, 5]), jnp.array([[3, 7], [0, 0]])
      >>> ragged_paged_attention(query, pages, lengths, table, jnp.array([0, 1, 6])).shape
      (6, 4, 32)
    """
    packed, pages = checks.packed_dtype("ragged_paged_attention", cache_dtype), None
    if new_keys is not None or new_values is not None:
        tables = kv_lens, page_indices, cu_q_lens, num_seqs
        scales = {"key_scale": key_scale, "value_scale": value_scale, "cache_dtype": packed}
        pages = _written(kv_pages, new_keys, new_values, *tables, **scales)
        kv_pages, key_scale, value_scale = pages
    cache = checks.cache("ragged_paged_attention", query, kv_pages, packed)
    tables = checks.tables("ragged_paged_attention", query.shape[0], kv_lens, page_indices, cu_q_lens, num_seqs)
    settings = checks.settings("ragged_paged_attention", query.shape[2], scale, window, softcap, packed)
    terms = checks.terms("ragged_paged_attention", query, cache, key_scale, value_scale, sinks)
    if query.size == 0 or kv_lens.size == 0:
        out = jnp.zeros((*query.shape[:2], cache.width), query.dtype)
        logsumexp = jnp.full(query.shape[:2], -jnp.inf, tk.accumulator(query.dtype))
    else:
        static: Any = {"settings": settings, "return_logsumexp": return_logsumexp, "target": target, **blocks}

        def attention(start: Any, query: jax.Array) -> tuple[jax.Array, jax.Array]:
            return paged_attention_op(query, cache, tables.of_tokens(start, query.shape[0]), terms, **static)

        out, logsumexp = over_rows(attention, query)
    results = (out, *([logsumexp] if return_logsumexp else []), *([pages] if pages is not None else []))
    return results if len(results) > 1 else out


@overload
def paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    *,
    new_keys: None = None,
    **options: Any,
) -> jax.Array: ...
@overload
def paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    *,
    new_keys: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Pages]: ...
@takes_python_numbers
def paged_attention(
    query: jax.Array,
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
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
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array | tuple[jax.Array, Pages]:
    """`ragged_paged_attention` of one token for each sequence: a step of decoding.

    Args:
      query: [B, N, H], the last token of each sequence.
      kv_pages: the cache, as in `ragged_paged_attention`.
      kv_lens: integers [B], the number of keys of each sequence, its token's included; 0 for no sequence.
      page_indices: integers [B, P].
      scale: of the dot products; H ** -0.5 if None.
      window: a token attends to so many keys, its own included; None for all.
      softcap: if given, a bound of the scores.
      sinks: float [N], as in `ragged_paged_attention`.
      key_scale: what keys are multiplied by, as in `ragged_paged_attention`.
      value_scale: the same for values.
      cache_dtype: "int4" or "float4_e2m1fn", for a cache of bytes, as in `ragged_paged_attention`.
      new_keys: [B, K, H]: the keys of the tokens, which `write_pages` puts into the cache first.
      new_values: [B, K, Hv], with `new_keys`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: `parts`, into how many parts the keys of a sequence are split, for programs of their own, instead of the
        schedule's number; it does not change the result beyond rounding.

    Returns:
      out[B, N, Hv] in the query's dtype; 0 for a sequence of length 0. With `new_keys` (out, pages): also the result of
      `write_pages`, the cache after the write, with its scales.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.paged_attention import paged_attention
      >>> query, keys, values = jnp.ones((2, 4, 32)), jnp.ones((8, 16, 2, 32)), jnp.ones((8, 16, 2, 64))
      >>> paged_attention(query, (keys, values), jnp.array([30, 5]), jnp.array([[3, 7], [0, 0]])).shape
      (2, 4, 64)
    """
    packed, pages = checks.packed_dtype("paged_attention", cache_dtype), None
    if new_keys is not None or new_values is not None:
        scales = {"key_scale": key_scale, "value_scale": value_scale, "cache_dtype": packed}
        pages = _written(kv_pages, new_keys, new_values, kv_lens, page_indices, **scales)
        kv_pages, key_scale, value_scale = pages
    cache = checks.cache("paged_attention", query, kv_pages, packed)
    tables = checks.tables("paged_attention", query.shape[0], kv_lens, page_indices)
    settings = checks.settings("paged_attention", query.shape[2], scale, window, softcap, packed)
    terms = checks.terms("paged_attention", query, cache, key_scale, value_scale, sinks)
    if query.size == 0:
        out = jnp.zeros((*query.shape[:2], cache.width), query.dtype)
    else:

        def decoded(start: Any, query: jax.Array, *rows: jax.Array) -> jax.Array:
            of_rows = tables.of_sequences(start, *rows)
            return decode_op(query, cache, of_rows, terms, settings=settings, target=target, **blocks)

        out = over_rows(decoded, query, tables.lengths, tables.pages)
    return out if pages is None else (out, pages)


def _written(kv_pages: Any, new_keys: Any, new_values: Any, *tables: Any, **scales: Any) -> Pages:
    """The cache with new keys and values.

    Raises:
      ArgumentError: keys came without values, or values without keys.
    """
    if new_keys is None or new_values is None:
        raise ArgumentError(
            "new keys and new values come together",
            expected="new_keys[T, K, H] and new_values[T, K, Hv], or neither",
            got=f"new_keys = {describe(new_keys)}, new_values = {describe(new_values)}",
            fix="leave both out if the cache has them already",
        )
    return write_pages(kv_pages, new_keys, new_values, *tables, **scales)
