"""The op: tokens of long sequences by tiles, tokens of short ones by parts of their keys, and both put together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.paged_attention.arguments import Cache, Items, Settings, Tables, Terms
from tilekern.kernels.paged_attention.kernel import attention_of_parts, attention_of_tokens, merged
from tilekern.kernels.paged_attention.keys import Softmax


def _out_type(
    query: Any, cache: Cache, tables: Any, terms: Any, *, settings: Settings, return_logsumexp: bool
) -> tuple[Any, ...]:
    tokens, heads, _ = query.shape
    row = jax.ShapeDtypeStruct((tokens, heads), tk.accumulator(query.dtype))
    out = jax.ShapeDtypeStruct((tokens, heads, cache.width), query.dtype)
    return out, row if return_logsumexp else None


@tk.op(out_type=_out_type)
def paged_attention_op(
    query: jax.Array,
    cache: Cache,
    tables: Tables,
    terms: Terms,
    *,
    settings: Settings,
    return_logsumexp: bool,
    few: tk.Block = 1,
    parts: tk.Block = 1,
    block_q: tk.Block = 32,
) -> tuple[jax.Array, jax.Array | None]:
    """query[T, N, H] -> out[T, N, Hv], and if asked for logsumexp[T, N]; 0 and -inf for tokens of no sequence.

    Sequences of up to `few` tokens have a program for each of `parts` parts of their keys; the other sequences one for
    each tile of `block_q` tokens.
    """
    tokens, heads, width = query.shape
    group = heads // cache.heads
    by_head = query.reshape(tokens, cache.heads, group, width).transpose(1, 0, 2, 3)
    sequence, place = sequences_of(tables, tokens)
    is_short = (sequence >= 0) & (tables.starts[sequence + 1] - tables.starts[sequence] <= few)

    rows = jnp.clip(tables.starts[:-1, None] + jnp.arange(few), 0, max(tokens - 1, 0))
    few_queries = by_head[:, rows].transpose(1, 0, 2, 3, 4).reshape(-1, cache.heads, few * group, width)
    static = {"settings": settings, "group": group}
    softmax = attention_of_parts(few_queries, cache, tables, terms, few=few, parts=parts, **static)
    results = merged(Softmax(*softmax))
    short = [x.reshape(-1, cache.heads, few, group, *x.shape[3:]) for x in results]
    short = [x[sequence, :, jnp.minimum(place, few - 1)] for x in short]

    items, item = items_of(tables, sequence, block_q, few)
    results = attention_of_tokens(
        by_head.reshape(cache.heads, tokens * group, width),
        items,
        cache,
        tables,
        terms,
        block_q=block_q,
        return_logsumexp=return_logsumexp,
        **static,
    )
    long = [x.reshape(-1, cache.heads, block_q, group, *x.shape[3:]) for x in results if x is not None]
    long = [x[item, :, jnp.arange(tokens) % block_q] for x in long]

    def of_both(number: int, nothing: float) -> jax.Array:
        """The rows of result `number`, [T, N, ...]."""
        result = of_tokens(sequence, is_short, short[number], long[number], nothing)
        return result.reshape(tokens, heads, *result.shape[3:])

    return of_both(0, 0.0), of_both(1, -jnp.inf) if return_logsumexp else None


def of_tokens(sequence: jax.Array, is_short: jax.Array, short: jax.Array, long: jax.Array, nothing: float) -> jax.Array:
    """The rows [T, ...] of each token: of `short` where its sequence is short, of `long` otherwise.

    `sequence` is int32[T], the sequence of each token. The rows of tokens of no sequence are `nothing`.
    """
    lead = (sequence.size,) + (1,) * (long.ndim - 1)
    of_sequences = jnp.where(is_short.reshape(lead), short.astype(long.dtype), long)
    return jnp.where((sequence >= 0).reshape(lead), of_sequences, nothing)


def sequences_of(tables: Tables, tokens: int) -> tuple[jax.Array, jax.Array]:
    """int32[T] twice: the sequence of each token, -1 for none, and the token's number in it."""
    ends = jnp.where(jnp.arange(tables.lengths.shape[0]) < tables.count[0], tables.starts[1:], tokens + 1)
    t = jnp.arange(tokens, dtype=jnp.int32)
    # jnp.searchsorted compares all, too, but takes no symbols of `jax.export` as sizes.
    sequence = (ends <= t[:, None]).sum(axis=1, dtype=jnp.int32)
    exists = sequence < jnp.minimum(tables.count[0], tables.lengths.shape[0])
    sequence = jnp.where(exists, sequence, -1)
    return sequence, jnp.where(exists, t - tables.starts[sequence], 0)


def positions_of(tables: Tables, tokens: int) -> tuple[jax.Array, jax.Array]:
    """int32[T] twice: the sequence of each token, -1 for none, and the token's place among the keys of its sequence.

    The place is negative for a token before its sequence.
    """
    sequence, _ = sequences_of(tables, tokens)
    shift = tables.lengths[sequence] - tables.starts[sequence + 1]
    return sequence, shift + jnp.arange(tokens, dtype=jnp.int32)


def items_of(tables: Tables, sequence: jax.Array, block_q: int, few: int) -> tuple[Items, jax.Array]:
    """The items of sequences of more than `few` tokens, for tiles of `block_q` tokens; int32[T], each token's item.

    `sequence` is int32[T], the sequence of each token.
    """
    tokens, sequences = sequence.shape[0], tables.lengths.shape[0]
    begin, end = tables.starts[:-1], tables.starts[1:]
    exists = (jnp.arange(sequences) < tables.count[0]) & (end - begin > few)
    first = begin // block_q
    counts = jnp.where(exists, (end - 1) // block_q + 1 - first, 0)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(tk.cdiv(tokens, block_q) + min(sequences, tokens // (few + 1)), dtype=jnp.int32)
    s = jnp.searchsorted(until, number, side="right", method="compare_all").astype(jnp.int32)
    is_item, s = s < sequences, jnp.minimum(s, sequences - 1)
    offset = first - (until - counts)
    items = Items(jnp.where(is_item, s, -1), jnp.where(is_item, number + offset[s], 0))
    return items, jnp.arange(tokens, dtype=jnp.int32) // block_q - offset[sequence]


def _type_of_tokens(query: Any, cache: Cache, tables: Any, terms: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*query.shape[:2], cache.width), query.dtype)


@tk.op(out_type=_type_of_tokens)
def decode_op(
    query: jax.Array, cache: Cache, tables: Tables, terms: Terms, *, settings: Settings, parts: tk.Block = 1
) -> jax.Array:
    """query[B, N, H], the last token of each sequence -> out[B, N, Hv]."""
    sequences, heads, width = query.shape
    group = heads // cache.heads
    by_head = query.reshape(sequences, cache.heads, group, width)
    softmax = attention_of_parts(by_head, cache, tables, terms, settings=settings, few=1, group=group, parts=parts)
    out, _ = merged(Softmax(*softmax))
    return out.reshape(sequences, heads, -1).astype(query.dtype)
