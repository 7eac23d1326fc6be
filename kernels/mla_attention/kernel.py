"""The kernels: of tiles of tokens and heads, and of sequences with few tokens, whose keys are split over programs."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.mla_attention.arguments import Latents, Scales
from tilekern.kernels.mla_attention.keys import LatentKeys
from tilekern.kernels.paged_attention.arguments import Items, Settings, Tables
from tilekern.kernels.paged_attention.keys import Softmax


def _types_of_tokens(
    query: Latents, items: Any, cache: Any, tables: Any, scales: Any, *, value_width: int, block_q: int,
    return_logsumexp: bool,
) -> tuple[Any, ...]:  # fmt: skip
    shape, dtype = (items.sequences.shape[0], block_q, query.latent.shape[1]), query.latent.dtype
    row = jax.ShapeDtypeStruct(shape, tk.accumulator(dtype))
    return jax.ShapeDtypeStruct((*shape, value_width), dtype), row if return_logsumexp else None


@tk.kernel(out_type=_types_of_tokens)
def latents_of_tokens(
    query: Latents,
    items: Items,
    cache: Latents,
    tables: Tables,
    scales: Scales,
    out: tk.Ref,
    logsumexp: tk.Ref | None,
    *,
    settings: Settings,
    value_width: int,
    block_q: int,
    return_logsumexp: bool,
    block_n: tk.Block = 16,
    block_k: tk.Block = 64,
    block_c: tk.Block = 512,
    block_p: tk.Block = 256,
) -> None:
    """query[T, N, C + R] -> out[I, block_q, N, C], and if asked for logsumexp[I, block_q, N].

    A program computes `block_n` heads of an item: a tile of `block_q` tokens, in which rows of other sequences than the
    item's attend to nothing: they are 0, their logsumexp is -inf.
    """
    tokens, heads, _ = query.latent.shape
    m = tk.parallel(items.sequences.shape[0])
    n = tk.parallel(heads, block_n)
    keys = LatentKeys(tables, settings, block_k, block_p, cache, scales, value_width, block_c)
    i, s = tk.tile(tokens, block_q, items.tiles[m]), items.sequences[m]
    softmax = keys.attend(
        _rows(query, value_width, block_c, (i, n)),
        s,
        keys.of_tile(i, s, block_n),
        keys.begin(block_q * block_n, tk.accumulator(query.latent.dtype)),
    )
    values, of_rows = softmax.result()
    _store(out, (m, slice(None), n), values, block_n)
    if logsumexp is not None:
        logsumexp[m, :, n] = of_rows.reshape(block_q, block_n)


def _types_of_parts(
    query: Latents, cache: Any, tables: Any, scales: Any, *, value_width: int, parts: int
) -> Softmax:  # fmt: skip
    sequences, few, heads, _ = query.latent.shape
    row = jax.ShapeDtypeStruct((sequences, parts, few, heads), tk.accumulator(query.latent.dtype))
    return Softmax(row, row, jax.ShapeDtypeStruct((*row.shape, value_width), row.dtype))


@tk.kernel(out_type=_types_of_parts)
def latents_of_parts(
    query: Latents,
    cache: Latents,
    tables: Tables,
    scales: Scales,
    largest: tk.Ref,
    total: tk.Ref,
    weighted: tk.Ref,
    *,
    settings: Settings,
    value_width: int,
    parts: int,
    block_n: tk.Block = 16,
    block_k: tk.Block = 64,
    block_c: tk.Block = 512,
    block_p: tk.Block = 256,
) -> None:
    """query[S, few, N, C + R] -> the `Softmax` of each of `parts` parts of the keys, [S, parts, few, N].

    Rows behind the last token of a sequence, and all rows of one of more than `few` tokens, attend to nothing.
    """
    sequences, few, heads, _ = query.latent.shape
    s = tk.parallel(sequences)
    part = tk.parallel(parts)
    n = tk.parallel(heads, block_n)
    keys = LatentKeys(tables, settings, block_k, block_p, cache, scales, value_width, block_c)
    softmax = keys.attend(
        _rows(query, value_width, block_c, (s, slice(None), n)),
        s,
        keys.of_part(s, part, few=few, parts=parts, heads=block_n),
        keys.begin(few * block_n, tk.accumulator(query.latent.dtype)),
    )
    largest[s, part, :, n] = softmax.largest.reshape(few, block_n)
    total[s, part, :, n] = softmax.total.reshape(few, block_n)
    _store(weighted, (s, part, slice(None), n), softmax.weighted, block_n)


def _rows(query: Latents, value_width: int, block_c: int, index: tuple[Any, ...]) -> list[jax.Array]:
    """The parts of queries, [tokens heads, columns], at an index of tokens and heads."""
    tiles = [array[(*index, columns)] for array, columns in query.columns(value_width, block_c)]
    return [tile.reshape(-1, tile.shape[-1]) for tile in tiles]


def _store(ref: tk.Ref, index: tuple[Any, ...], parts: tuple[jax.Array, ...], block_n: int) -> None:
    """Store the parts [tokens heads, columns] of values at an index of tokens and heads."""
    start = 0
    for part in parts:
        rows, width = part.shape
        ref[(*index, tk.ds(start, width))] = part.astype(ref.dtype).reshape(rows // block_n, block_n, width)
        start += width
