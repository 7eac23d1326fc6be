"""The public functions: scores of all keys, and the positions of the best ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import hide_frames, static_int, takes_python_numbers
from tilekern.kernels.index_scores import checks
from tilekern.kernels.index_scores.kernel import Places, scores_of_keys
from tilekern.kernels.paged_attention.checks import scale_of_cache
from tilekern.kernels.paged_attention.checks import tables as checked_tables
from tilekern.kernels.paged_attention.op import positions_of
from tilekern.kernels.symbolic_rows import over_rows

hide_frames(__file__)


@takes_python_numbers
def index_scores(
    query: jax.Array,
    head_weights: jax.Array,
    key_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array:
    """The lightning indexer's score of each token for each key of its sequence: Σ_j w[t, j] relu(q[t, j] · k[n]).

    All heads share one key of D numbers: 64 heads and D = 128 in DeepSeek-V3.2. Tokens, lengths and pages are as in
    `mla_attention`: the keys of a page are at the same places as its latents. Products and sums are in float32 (float64
    for float64). Source: DeepSeek-V3.2-Exp, 2025, equation 1, https://github.com/deepseek-ai/DeepSeek-V3.2-Exp.

    Args:
      query: [T, J, D], float32, bfloat16, float16 or float64.
      head_weights: floats [T, J]. A scale of the scores, and scales of a quantised query, belong to them.
      key_pages: [pages, page, D] or [pages, page, 1, D], of the query's dtype, int8, float8_e4m3fn or float8_e5m2. The
        cache is read in place.
      kv_lens: integers [S], from 0. Keys behind the last page of the table do not exist.
      page_indices: integers [S, P]; a page that is not in the cache has keys of 0.
      cu_q_lens: integers [S + 1], ascending from 0, up to T at most; None for a step of decoding, one token of each
        sequence, T = S.
      num_seqs: the number of sequences, an int or an integer array of shape () or (1,); S if None.
      key_scale: what keys are multiplied by: a number, or floats of shape () for all, or [pages, page] for each key.
        None for 1.
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: `block_k`, the keys of a program: whole pages, or a divisor of one; `block_p`, the most pages of a load.
        No block changes the result beyond rounding.

    Returns:
      [T, P page], float32 (float64 for float64), of which element n is of key n of the token's sequence; -inf for keys
      behind the token's own, and for tokens of no sequence.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.index_scores import index_scores
      >>> query, keys = jnp.ones((2, 4, 8)), jnp.ones((3, 2, 8))
      >>> index_scores(query, jnp.full((2, 4), 0.5), keys, jnp.array([3, 0]), jnp.array([[2, 0], [0, 0]]))
      Array([[ 16.,  16.,  16., -inf],
             [-inf, -inf, -inf, -inf]], dtype=float32)
    """
    keys = checks.keys_of_queries("index_scores", query, head_weights, key_pages)
    tokens = query.shape[0]
    tables = checked_tables("index_scores", tokens, kv_lens, page_indices, cu_q_lens, num_seqs)
    remedy = "a scale for all, or for each key"
    scale = scale_of_cache("index_scores", "key_scale", key_scale, [keys.shape[:2]], remedy)
    columns = page_indices.shape[1] * keys.shape[1]
    if 0 in (tokens, columns, kv_lens.size):
        return jnp.full((tokens, columns), -jnp.inf, tk.accumulator(query.dtype))
    sequence, position = positions_of(tables, tokens)
    positions = jnp.where(sequence >= 0, position, -1)
    if query.size == 0:
        seen = jnp.arange(columns, dtype=jnp.int32) <= positions[:, None]
        return jnp.where(seen, 0, -jnp.inf).astype(tk.accumulator(query.dtype))

    def scores(start: Any, query: jax.Array, weights: jax.Array, sequence: jax.Array, *rows: jax.Array) -> Any:
        positions, pages = rows if decodes else (*rows, tables.pages)
        places = Places(jnp.maximum(sequence - start if decodes else sequence, 0), positions, pages)
        return scores_of_keys(query, weights, keys, scale, places, target=target, **blocks)

    decodes = cu_q_lens is None
    return over_rows(scores, query, head_weights, sequence, positions, *([tables.pages] if decodes else []))


@takes_python_numbers
def select_keys(
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
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array:
    """The positions of the keys with the largest `index_scores`, for `selected` of `mla_attention`.

    A token that sees no more than `num_keys` keys selects them all. The scores are in memory, 4 T P page bytes: call it
    for some tokens of a long prompt at a time.

    Args:
      query: [T, J, D], as in `index_scores`.
      head_weights: floats [T, J].
      key_pages: [pages, page, D] or [pages, page, 1, D].
      kv_lens: integers [S].
      page_indices: integers [S, P].
      cu_q_lens: integers [S + 1]; None for one token of each sequence, T = S.
      num_seqs: the number of sequences; S if None.
      num_keys: how many keys a token selects, 2048 in DeepSeek-V3.2.
      key_scale: what keys are multiplied by, as in `index_scores`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: as of `index_scores`.

    Returns:
      int32[T, num_keys], by descending score, the earlier of two equal keys first; -1 behind the last key.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or the number of keys do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.index_scores import select_keys
      >>> query, keys = jnp.ones((1, 1, 1)), jnp.array([[[3.0], [1.0]], [[2.0], [5.0]]])
      >>> select_keys(query, jnp.ones((1, 1)), keys, jnp.array([3]), jnp.array([[0, 1]]), num_keys=4)
      Array([[ 0,  2,  1, -1]], dtype=int32)
    """
    count = static_int(num_keys, "num_keys", 1)
    scores = index_scores(
        query,
        head_weights,
        key_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        key_scale=key_scale,
        target=target,
        **blocks,
    )
    return best_of_scores(scores, count)


def best_of_scores(scores: jax.Array, count: int) -> jax.Array:
    """int32[T, count]: the columns of the largest numbers of scores [T, L], without -inf; -1 behind them."""
    largest, columns = jax.lax.top_k(scores, min(count, scores.shape[1]))
    selected = jnp.where(largest == -jnp.inf, -1, columns.astype(jnp.int32))
    return jnp.pad(selected, ((0, 0), (0, count - selected.shape[1])), constant_values=-1)
