"""The ops: tokens of long sequences by tiles, tokens of short ones by parts of their keys, and both put together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.mla_attention.arguments import Latents, Scales
from tilekern.kernels.mla_attention.kernel import latents_of_parts, latents_of_tokens
from tilekern.kernels.paged_attention.arguments import Settings, Tables
from tilekern.kernels.paged_attention.kernel import merged
from tilekern.kernels.paged_attention.keys import Softmax
from tilekern.kernels.paged_attention.op import items_of, of_tokens, sequences_of


def _out_type(
    query: Latents, cache: Any, tables: Any, scales: Any, *, value_width: int, return_logsumexp: bool
) -> tuple[Any, ...]:
    rows, dtype = query.latent.shape[:2], query.latent.dtype
    logsumexp = jax.ShapeDtypeStruct(rows, tk.accumulator(dtype))
    return jax.ShapeDtypeStruct((*rows, value_width), dtype), logsumexp if return_logsumexp else None


@tk.op(out_type=_out_type)
def mla_ragged_op(
    query: Latents,
    cache: Latents,
    tables: Tables,
    scales: Scales,
    *,
    settings: Settings,
    value_width: int,
    return_logsumexp: bool,
    few: tk.Block = 1,
    parts: tk.Block = 1,
    block_q: tk.Block = 4,
) -> tuple[jax.Array, jax.Array | None]:
    """query[T, N, C + R] -> out[T, N, C], and if asked for logsumexp[T, N]; 0 and -inf for tokens of no sequence.

    Sequences of up to `few` tokens have a program for each of `parts` parts of their keys; the other sequences one for
    each tile of `block_q` tokens.
    """
    tokens = query.latent.shape[0]
    static: dict[str, Any] = {"settings": settings, "value_width": value_width}
    sequence, place = sequences_of(tables, tokens)
    is_short = (sequence >= 0) & (tables.starts[sequence + 1] - tables.starts[sequence] <= few)

    rows = jnp.clip(tables.starts[:-1, None] + jnp.arange(few), 0, max(tokens - 1, 0))
    of_few = Latents(*(x if x is None else x[rows] for x in query))
    results = merged(Softmax(*latents_of_parts(of_few, cache, tables, scales, parts=parts, **static)))
    short = [x[sequence, jnp.minimum(place, few - 1)] for x in results]

    items, item = items_of(tables, sequence, block_q, few)
    flag = {"return_logsumexp": return_logsumexp}
    results = latents_of_tokens(query, items, cache, tables, scales, block_q=block_q, **static, **flag)
    long = [x[item, jnp.arange(tokens) % block_q] for x in results if x is not None]
    out = of_tokens(sequence, is_short, short[0], long[0], 0.0)
    return out, of_tokens(sequence, is_short, short[1], long[1], -jnp.inf) if return_logsumexp else None


@tk.op(out_type=_out_type)
def mla_selected_op(
    query: Latents,
    cache: Latents,
    tables: Tables,
    scales: Scales,
    *,
    settings: Settings,
    value_width: int,
    return_logsumexp: bool,
    parts: tk.Block = 1,
    gathered: tk.Choice[bool] = False,
) -> tuple[jax.Array, jax.Array | None]:
    """query[T, N, C + R] -> out[T, N, C], and if asked for logsumexp[T, N], of the keys of each token in `tables`.

    `tables` is of `tables_of_selected`: each token is a sequence, whose pages are single rows of the cache. Without
    `gathered` the kernel loads them where they lie. With it XLA copies the keys of each token to a page first.
    """
    numbers = tables.pages

    def as_pages(array: Any) -> Any:
        """An array [pages, page, ...] as [rows, 1, ...]; gathered as [T, k, ...]."""
        if array is None or (array.ndim == 1):  # a scale for all
            return array
        rows = array.reshape(-1, *array.shape[2:])
        return rows.at[numbers].get(mode="fill", fill_value=0) if gathered else rows[:, None]

    if gathered:
        tables = tables._replace(pages=jnp.arange(numbers.shape[0], dtype=jnp.int32)[:, None])
    static: dict[str, Any] = {"settings": settings, "value_width": value_width, "parts": parts}
    return _decoded(
        query, Latents(*map(as_pages, cache)), tables, Scales(*map(as_pages, scales)), return_logsumexp, **static
    )


@tk.op(out_type=_out_type)
def mla_decode_op(
    query: Latents,
    cache: Latents,
    tables: Tables,
    scales: Scales,
    *,
    settings: Settings,
    value_width: int,
    return_logsumexp: bool,
    parts: tk.Block = 1,
) -> tuple[jax.Array, jax.Array | None]:
    """query[B, N, C + R], the last token of each sequence -> out[B, N, C], and if asked for logsumexp[B, N]."""
    static: dict[str, Any] = {"settings": settings, "value_width": value_width, "parts": parts}
    return _decoded(query, cache, tables, scales, return_logsumexp, **static)


def _decoded(
    query: Latents, cache: Latents, tables: Tables, scales: Scales, return_logsumexp: bool, **static: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The result of `mla_decode_op`."""
    of_few = Latents(*(x if x is None else x[:, None] for x in query))
    out, logsumexp = merged(Softmax(*latents_of_parts(of_few, cache, tables, scales, **static)))
    return out[:, 0].astype(query.latent.dtype), logsumexp[:, 0] if return_logsumexp else None
