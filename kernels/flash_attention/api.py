"""The public function: checks, defaults, and leading dims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import jax

import tilekern as tk
from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import scale_of_scores, sinks_of_heads, softcap_of_scores
from tilekern.kernels.flash_attention import checks
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.block_map import BlockMap
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.segments import ranges

hide_frames(__file__)

Mod = Callable[..., jax.Array]
Precision = str | tuple[str | None, str | None] | None


class Options(TypedDict, total=False):
    """The keyword arguments of `flash_attention` but `return_logsumexp`, which decides the type of the result."""

    scale: float | None
    causal: bool
    q_offset: int | jax.Array
    window: tuple[int | None, int | None] | None
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None
    q_lengths: jax.Array | None
    kv_lengths: jax.Array | None
    softcap: float | None
    sinks: jax.Array | None
    mask_mod: Mod | None
    score_mod: Mod | None
    block_map: BlockMap | None
    dropout_rate: float
    dropout_key: jax.Array | None
    dropout_broadcast: bool
    precision: Precision
    target: str | None
    block_q: int | None
    block_k: int | None
    block_n: int | None
    backward_block_q: int | None
    backward_block_k: int | None
    num_warps: int | None
    num_stages: int | None


@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    return_logsumexp: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    return_logsumexp: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@takes_python_numbers
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    q_offset: int | jax.Array = 0,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mask_mod: Mod | None = None,
    score_mod: Mod | None = None,
    block_map: BlockMap | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_broadcast: bool = False,
    return_logsumexp: bool = False,
    precision: Precision = None,
    target: str | None = None,
    **blocks: int | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, softmax(scores) value, without the matrix of scores in memory, nor for any derivative.

    The score of query i and key j, of element b of the batch and head n, which reads head n // (N / K) of key and value
    (grouped-query attention), is, in float32 (float64 for float64 inputs),

        score_mod(softcap * tanh((scale * query·key + bias) / softcap), b, n, i, j).

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
      query: [*B, T, N, H], float32, bfloat16, float16 or float64.
      key: [*B, S, K, H] of the same dtype; K divides N.
      value: [*B, S, K, Hv] of the same dtype.
      bias: float [*B, N, T, S], each dim (all of *B together) of its size or of size 1; -inf is a mask, too.
      mask: bool of such a shape; True: the query attends to the key.
      scale: of the dot products; H ** -0.5 if None.
      causal: query i attends to the keys j <= i + q_offset (top-left aligned at offset 0, as in jax.nn).
      q_offset: the position of the first query among the keys, in elements: an int (static), or an integer array of
        shape () or [*B]. Only `causal` and `window` look at it.
      window: (left, right): query i attends to i + q_offset - left <= j <= i + q_offset + right; None is unbounded.
      segment_ids: integers [*B, T] and [*B, S] (one array stands for both if T = S): only equal ids attend to each
        other, wherever they stand: 1 2 1 are two segments, and three sequences of `linear_attention`. Fastest where
        the ids of a sequence are sorted: sequences one after the other.
      q_lengths: integers [*B]: queries from this index on attend to nothing, and may hold anything, NaN included.
      kv_lengths: integers [*B]: nothing attends to keys from this index on; the keys and values may hold anything.
      softcap: if given, a bound of the scores, from 1e-30 to 1e30.
      sinks: float [N]: logits that take part in each row's softmax, but have no value (StreamingLLM, gpt-oss).
      mask_mod: `mask_mod(b, n, i, j)` is True where query i attends to key j; elementwise jnp code on int32 arrays that
        broadcast.
      score_mod: `score_mod(score, b, n, i, j)` is the score instead: elementwise jnp code.
        What mixes elements is refused, for results would depend on tiles. Where a query does not attend, and at
        positions that do not exist, a function may return anything, NaN included. Both may be a
        `jax.tree_util.Partial(function, *arrays)`: the arrays come first, and are read at integers made of b and n, and
        at i and j themselves, as slopes[n], table[b, j] or bias[n, i, j]. They may be longer than that. A traced array
        that a function closes over is carried, too, and has a gradient, if it is read in that way.
      block_map: the map of `mask`, or of `mask_mod`, made once for many calls; otherwise each call makes a map.
      dropout_rate: the share of weights that is set to 0; all other weights are divided by 1 - dropout_rate.
      dropout_key: of `jax.random`, or its data. A weight is dropped, or not, by key, b, n, i and j alone, everywhere.
      dropout_broadcast: drop the weights of the same pairs i, j in every element of the batch and in every head.
      return_logsumexp: return (out, logsumexp); it is differentiable, too.
      precision: of products of float32: None or "highest" multiplies as float32, "tf32", "bf16x3", "bf16x6" and "bf16"
        allow a backend this algorithm; a pair is (of query key, of weights value).
      target: lower for this target's blocks, e.g. "cpu:xla".
      **blocks: `block_q` and `block_k`, queries and keys of a tile, instead of the schedule's; `block_n`, how many of
        the heads that share a head of the keys are in one tile (one, where there is a bias, a mask, a mod or dropout);
        and `backward_block_q` and `backward_block_k` for the derivatives. No block changes the result beyond rounding.

    Returns:
      out[*B, T, N, Hv] in the query's dtype; a row that attends to nothing is 0. With `return_logsumexp` also
      the logsumexp of its scores (natural logarithm), [*B, T, N] in float32, -inf for such a row.

    Under differentiation, `out` and `logsumexp` have the names "flash_attention_out" and "flash_attention_logsumexp"
    for the policies of `jax.checkpoint`: a policy that saves both names computes nothing of the attention again.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tilekern.kernels.flash_attention import flash_attention
      >>> q = k = v = jnp.ones((2, 100, 4, 32))
      >>> flash_attention(q, k, v, causal=True).shape
      (2, 100, 4, 32)
      >>> jax.grad(lambda q: flash_attention(q, k, v, window=(16, 0), softcap=30.0).sum())(q).shape
      (2, 100, 4, 32)
    """
    batch = checks.arrays(query, key, value)
    sizes = checks.Sizes(batch, query.shape[-3], key.shape[-3], query.shape[-2])
    offsets, offset, window = checks.positions(q_offset, window, checks.causal(causal), sizes)
    segments = checks.segments(segment_ids, sizes)
    mask, mask_mod, live = checks.masks(mask, mask_mod, block_map, sizes, blocks)
    wide = tk.accumulator(query.dtype)
    config = Config(
        scale=scale_of_scores("flash_attention", scale, query.shape[-1]),
        causal=causal,
        offset=offset,
        window=window,
        softcap=softcap_of_scores("flash_attention", softcap),
        dropout_rate=checks.dropout(dropout_rate, dropout_key),
        dropout_broadcast=checks.dropout_broadcast(dropout_broadcast),
        precision=checks.precision(precision),
        blocks=checks.backward_blocks(blocks),
    )
    extras = Extras(
        bias=checks.bias(bias, sizes),
        mask=mask,
        q_offset=offsets,
        segments=segments,
        ranges=None if segments is None or live is not None else ranges(*segments),
        q_lengths=checks.lengths("q_lengths", q_lengths, sizes),
        kv_lengths=checks.lengths("kv_lengths", kv_lengths, sizes),
        sinks=sinks_of_heads("flash_attention", sinks, sizes.heads),
        dropout_key=checks.key_data(dropout_key) if dropout_rate else None,
        mask_mod=mask_mod,
        score_mod=checks.score_mod(score_mod, sizes, wide),
        block_map=live,
    )
    flat = (x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    out, logsumexp, _ = flash_attention_forward(
        *flat,
        extras,
        config=config,
        return_logsumexp=return_logsumexp,
        target=target,
        **{name: size for name, size in blocks.items() if not name.startswith("backward_")},
    )
    if len(batch) != 1:
        out = out.reshape(*batch, *out.shape[1:])
        logsumexp = logsumexp.reshape(*batch, *logsumexp.shape[1:]) if return_logsumexp else logsumexp
    return (out, logsumexp) if return_logsumexp else out
