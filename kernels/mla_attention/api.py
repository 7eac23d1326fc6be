"""The public function: checks, and calls without tokens or keys."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import hide_frames, static_int, takes_python_numbers
from tilekern.kernels.checks import as_int32
from tilekern.kernels.mla_attention import checks
from tilekern.kernels.mla_attention.arguments import Latents
from tilekern.kernels.mla_attention.op import mla_decode_op, mla_ragged_op, mla_selected_op
from tilekern.kernels.mla_attention.pages import write_latents
from tilekern.kernels.mla_attention.selected import tables_of_selected
from tilekern.kernels.paged_attention.arguments import Settings
from tilekern.kernels.paged_attention.checks import tables as checked_tables
from tilekern.kernels.symbolic_rows import over_rows

hide_frames(__file__)


@overload
def mla_attention(
    query: jax.Array | tuple[jax.Array, jax.Array],
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    scale: float,
    new_latents: None = None,
    return_logsumexp: Literal[False] = False,
    **options: Any,
) -> jax.Array: ...
@overload
def mla_attention(
    query: jax.Array | tuple[jax.Array, jax.Array],
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    scale: float,
    new_latents: None = None,
    return_logsumexp: Literal[True],
    **options: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def mla_attention(
    query: jax.Array | tuple[jax.Array, jax.Array],
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    scale: float,
    new_latents: jax.Array | tuple[jax.Array, jax.Array],
    **options: Any,
) -> tuple[Any, ...]: ...
@takes_python_numbers
def mla_attention(
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
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array | tuple[Any, ...]:
    """Multi-head latent attention, absorbed: causal softmax attention of many sequences to latents in pages.

    All heads share one key of C + R numbers, a latent and a rotated key, and its first C numbers are the value: C = 512
    and R = 64 in DeepSeek-V2, -V3 and Kimi K2. The products that make keys and values of heads out of a latent are in
    the query, [q W_UK, q_rope], and behind the result, out W_UV. Tokens, lengths and pages are as in
    `ragged_paged_attention`: prompts, chunks of prompts and single tokens go into one call. Sequence s has the tokens
    cu_q_lens[s], ..., cu_q_lens[s + 1] - 1, its last ones, and kv_lens[s] keys. Key n of the sequence is key n % page
    of page page_indices[s, n // page]. A token attends to the keys up to its own. Scores and sums are in float32
    (float64 for float64). Source: DeepSeek-V2, 2024, section 2.1 and appendix C, https://arxiv.org/abs/2405.04434.

    Args:
      query: [T, N, C + R], float32, bfloat16, float16 or float64; or a pair [T, N, C] and [T, N, R].
      kv_pages: [pages, page, C + R] or [pages, page, 1, C + R]; or a pair [pages, page, C] and [pages, page, R]. Each
        array is of the query's dtype, int8, float8_e4m3fn or float8_e5m2. The cache is read in place.
      kv_lens: integers [S], from 0. Keys behind the last page of the table do not exist.
      page_indices: integers [S, P]. Entries that no key needs may hold anything; a page that is not in the cache has
        latents of 0.
      cu_q_lens: integers [S + 1], ascending from 0, up to T at most; None for a step of decoding, one token of each
        sequence, T = S.
      num_seqs: the number of sequences, an int or an integer array of shape () or (1,); S if None. Entries of tables
        from this number on may hold anything.
      scale: of the dot products. It has no default, because it is of the heads before they were absorbed: (128 + 64) **
        -0.5 for DeepSeek-V2-Lite; models with YaRN multiply it by a square of their `mscale`.
      value_width: C, the width of a latent, and of a value.
      latent_scale: what cached latents are multiplied by: a number, or floats of shape () for all, or [pages, page] for
        each key. None for 1.
      rope_scale: the same for rotated keys.
      selected: integers [T, k], the positions in its sequence of the keys that a token attends to, each at most once,
        such as the result of `select_keys` (DeepSeek Sparse Attention). A position that the token does not see, such
        as -1, counts for nothing. None: a token attends to all keys up to its own.
      new_latents: [T, C + R], or a pair [T, C] and [T, R]: the latents and rotated keys of the tokens, which
        `write_latents` puts into the cache first.
      return_logsumexp: return (out, logsumexp), to merge parts of sequences.
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: `parts`, into how many parts the keys of a sequence are split, for programs of their own; with
        `cu_q_lens` for sequences of up to `few` tokens, and `block_q`: tokens of a tile of the other sequences. With
        `selected` `parts` of the keys of each token, and `gathered`, whether XLA copies its keys to a page first. No
        block changes the result beyond rounding.

    Returns:
      out[T, N, C] in the query's dtype; tokens of no sequence, and tokens without keys, are 0. With `return_logsumexp`
      also the logsumexp of a token's scores (natural logarithm), [T, N] in float32 (float64 for float64), -inf for such
      tokens. With `new_latents`, last, also the result of `write_latents`: the cache after the write, with its scales.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.mla_attention import mla_attention
      >>> query, pages = jnp.ones((6, 16, 576)), jnp.ones((8, 16, 576))
      >>> lengths, table = jnp.array([30, 5]), jnp.array([[3, 7], [0, 0]])
      >>> mla_attention(query, pages, lengths, table, jnp.array([0, 1, 6]), scale=192**-0.5).shape
      (6, 16, 512)
    """
    width = static_int(value_width, "value_width", 1)
    pages = None
    if new_latents is not None:
        tables = kv_lens, page_indices, cu_q_lens, num_seqs
        scales: Any = {"latent_scale": latent_scale, "rope_scale": rope_scale}
        pages = write_latents(kv_pages, new_latents, *tables, value_width=width, **scales)
        kv_pages, latent_scale, rope_scale = pages
    rows, cache = checks.latents("mla_attention", "query", query, kv_pages, width)
    tables = checked_tables("mla_attention", rows.latent.shape[0], kv_lens, page_indices, cu_q_lens, num_seqs)
    settings = Settings(checks.scale_of_scores("mla_attention", scale), None, None)
    scales = checks.scales("mla_attention", cache, latent_scale, rope_scale)
    checks.selected("mla_attention", selected, rows.latent.shape[0])
    if 0 in (rows.latent.size, kv_lens.size, 1 if selected is None else selected.size * cache.latent.size):
        lead, dtype = rows.latent.shape[:2], rows.latent.dtype
        out, logsumexp = jnp.zeros((*lead, width), dtype), jnp.full(lead, -jnp.inf, tk.accumulator(dtype))
    else:
        static: Any = {"settings": settings, "value_width": width, "return_logsumexp": return_logsumexp}
        static |= {"target": target, **blocks}
        if selected is not None:
            tables = tables_of_selected(tables, as_int32(selected), cache.latent)

        def decoded(start: Any, latent: jax.Array, rope: jax.Array | None, *rows: jax.Array) -> Any:
            op = mla_decode_op if selected is None else mla_selected_op
            return op(Latents(latent, rope), cache, tables.of_sequences(start, *rows), scales, **static)

        def attention(start: Any, latent: jax.Array, rope: jax.Array | None) -> Any:
            of_tokens = tables.of_tokens(start, latent.shape[0])
            return mla_ragged_op(Latents(latent, rope), cache, of_tokens, scales, **static)

        if cu_q_lens is None or selected is not None:
            out, logsumexp = over_rows(decoded, *rows, tables.lengths, tables.pages)
        else:
            out, logsumexp = over_rows(attention, *rows)
    results = (out, *([logsumexp] if return_logsumexp else []), *([pages] if pages is not None else []))
    return results if len(results) > 1 else out
