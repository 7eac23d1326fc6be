"""The kernels: of tiles of tokens, and of sequences with few tokens, whose keys are split over programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention.scores import LN_2
from tilekern.kernels.paged_attention.arguments import Cache, Items, Settings, Tables, Terms
from tilekern.kernels.paged_attention.keys import Keys, Softmax


def _types_of_tokens(
    query: Any, items: Any, cache: Cache, tables: Any, terms: Any, *, group: int, block_q: int, return_logsumexp: bool
) -> tuple[Any, ...]:
    shape = items.sequences.shape[0], query.shape[0], block_q * group
    row = jax.ShapeDtypeStruct(shape, tk.accumulator(query.dtype))
    return jax.ShapeDtypeStruct((*shape, cache.width), query.dtype), row if return_logsumexp else None


@tk.kernel(out_type=_types_of_tokens)
def attention_of_tokens(
    query: tk.Ref,
    items: Items,
    cache: Cache,
    tables: Tables,
    terms: Terms,
    out: tk.Ref,
    logsumexp: tk.Ref | None,
    *,
    settings: Settings,
    group: int,
    block_q: int,
    return_logsumexp: bool,
    block_k: tk.Block = 128,
    block_g: tk.Block = 1,
    block_p: tk.Block = 256,
) -> None:
    """query[K, T group, H] -> out[I, K, block_q group, Hv], and if asked for logsumexp[I, K, block_q group].

    Rows t group, ..., t group + group - 1 are of token t. A program computes an item: a tile of `block_q` tokens, in
    which rows of other sequences than the item's attend to nothing: they are 0, their logsumexp is -inf.
    """
    heads, rows, _ = query.shape
    n = tk.parallel(items.sequences.shape[0])
    g = tk.parallel(heads, block_g)
    wide = tk.accumulator(query.dtype)
    keys = Keys(tables, settings, block_k, block_p, cache, terms, g)
    i, s = tk.tile(rows // group, block_q, items.tiles[n]), items.sequences[n]
    softmax = keys.attend(
        query[keys.heads, i * group],
        s,
        keys.of_tile(i, s, group),
        keys.begin_with_sinks(block_q * group, group, wide),
    )
    values, of_rows = softmax.result()
    out[n, keys.heads] = values.astype(out.dtype)
    if logsumexp is not None:
        logsumexp[n, keys.heads] = of_rows


def _types_of_parts(query: Any, cache: Cache, tables: Any, terms: Any, *, group: int, parts: int) -> Softmax:
    sequences, heads, rows, _ = query.shape
    row = jax.ShapeDtypeStruct((sequences, parts, heads, rows), tk.accumulator(query.dtype))
    return Softmax(row, row, jax.ShapeDtypeStruct((*row.shape, cache.width), row.dtype))


@tk.kernel(out_type=_types_of_parts)
def attention_of_parts(
    query: tk.Ref,
    cache: Cache,
    tables: Tables,
    terms: Terms,
    largest: tk.Ref,
    total: tk.Ref,
    weighted: tk.Ref,
    *,
    settings: Settings,
    few: int,
    group: int,
    parts: int,
    block_k: tk.Block = 128,
    block_g: tk.Block = 1,
    block_p: tk.Block = 256,
) -> None:
    """query[S, K, few group, H] -> the `Softmax` of each of `parts` parts of the keys, [S, parts, K, few group].

    Row t group + n of sequence s is of its token t; rows behind its last token, and all rows of a sequence of more than
    `few` tokens, attend to nothing. A part is whole tiles of keys (FlashDecoding, Dao et al. 2023,
    https://pytorch.org/blog/flash-decoding/).
    """
    _, heads, rows, _ = query.shape
    s = tk.parallel(query.shape[0])
    part = tk.parallel(parts)
    g = tk.parallel(heads, block_g)
    wide = tk.accumulator(query.dtype)
    keys = Keys(tables, settings, block_k, block_p, cache, terms, g)

    softmax = keys.attend(
        query[s, keys.heads],
        s,
        keys.of_part(s, part, few=few, parts=parts, heads=group),
        keys.begin_with_sinks(rows, group, wide, with_sinks=part == 0),
    )
    for ref, value in zip((largest, total, weighted), softmax, strict=True):
        ref[s, part, keys.heads] = value


def merged(parts: Softmax) -> tuple[jax.Array, jax.Array]:
    """The values [S, K, R, Hv] and logsumexp [S, K, R] of the softmax of all parts, [S, parts, K, R]."""
    largest = parts.largest.max(axis=1, keepdims=True)
    shrink = jnp.exp2(parts.largest - jnp.where(largest == -jnp.inf, 0, largest))
    total = (parts.total * shrink).sum(axis=1)
    weighted = (parts.weighted * shrink[..., None]).sum(axis=1)
    logsumexp = (largest[:, 0] + jnp.log2(total)) * LN_2
    return weighted / jnp.where(total == 0, 1, total)[..., None], logsumexp
