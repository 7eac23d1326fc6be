"""The definition of attention, in plain jnp, with the whole score matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk


def reference(
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
    segment_ids: Any = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_broadcast: bool = False,
    return_logsumexp: bool = False,
    dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of query[*B, T, N, H] to key[*B, S, K, H] and value[*B, S, K, Hv]; head n reads key head n // (N / K).

    The arguments are as for `flash_attention`; `dropout_rate` is a Python number. Logits, softmax and products are in
    `dtype`; None: float32, or float64 for float64 inputs. A row that attends to nothing is 0. JAX differentiates
    this function in either mode and to any order.

    Returns:
      out[*B, T, N, Hv] in the query's dtype; with `return_logsumexp` also the logsumexp of the logits [*B, T, N]
      (natural logarithm; -inf for a row that attends to nothing, without sinks).
    """
    wide = dtype or (jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    batch, (queries, heads, width), (keys, groups) = query.shape[:-3], query.shape[-3:], key.shape[-3:-1]
    shape = (math.prod(batch), heads, queries, keys)
    b, n, i, j = jnp.indices(shape, dtype=jnp.int32, sparse=True)

    def scores_of(x: Any) -> jax.Array:
        return jnp.broadcast_to(x, (*batch, *shape[1:])).reshape(shape)

    q = _inside(query, q_lengths).astype(wide)
    k, v = (jnp.repeat(_inside(x, kv_lengths).astype(wide), heads // max(groups, 1), axis=2) for x in (key, value))
    exact = jax.lax.Precision.HIGHEST
    scale = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision=exact) * scale
    if bias is not None:
        s = s + scores_of(bias).astype(wide)

    attends = _positions(i, j, causal, q_offset, window) & _members(i, j, segment_ids, q_lengths, kv_lengths)
    if mask is not None:
        attends = attends & scores_of(mask)
    if mask_mod is not None:
        attends = attends & mask_mod(b, n, i, j)
    # The gradient of a masked logit is 0 times the derivatives of softcap and score_mod, and 0 * NaN is NaN.
    s = jnp.where(attends, s, 0)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if score_mod is not None:
        s = score_mod(s, b, n, i, j).astype(wide)
    # A row with +inf is NaN. The select keeps compilers from merging a product into the difference from the largest.
    s = jnp.where(attends, jnp.where(s < jnp.inf, s, jnp.nan), -jnp.inf)

    weights, logsumexp = _softmax(s, None if sinks is None else jnp.asarray(sinks).astype(wide)[:, None, None])
    if dropout_rate:
        of_head = (0, 0) if dropout_broadcast else (b, n)
        bits = tk.random_bits(_key_data(dropout_key), *of_head, i, j)
        survives = bits >= np.uint32(min(int(dropout_rate * 2**32), 2**32 - 1))
        weights = jnp.where(survives, weights / (1 - dropout_rate) if dropout_rate < 1 else 0, 0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v, precision=exact).astype(query.dtype)
    out = out.reshape(*batch, *out.shape[1:])
    logsumexp = jnp.moveaxis(logsumexp[..., 0], 1, 2)
    return (out, logsumexp.reshape(*batch, queries, heads)) if return_logsumexp else out


def reference_with_logsumexp(*arrays: Any, **keywords: Any) -> tuple[jax.Array, jax.Array]:
    """`reference` with its second result, for arrays and keywords as of `reference`."""
    return cast("tuple[jax.Array, jax.Array]", reference(*arrays, return_logsumexp=True, **keywords))


def _inside(x: Any, lengths: Any) -> jax.Array:
    """x[*B, T, N, H] as [B, T, N, H], with 0 at the positions from lengths[*B] on, whatever they hold."""
    flat = jnp.asarray(x).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    if lengths is None:
        return flat
    inside = jnp.arange(flat.shape[1]) < jnp.asarray(lengths).reshape(-1, 1)
    return jnp.where(inside[:, :, None, None], flat, 0)


def _positions(i: jax.Array, j: jax.Array, causal: bool, q_offset: Any, window: Any) -> jax.Array:
    """The mask of `causal` and `window`: True where key j is in the range of query i."""
    left, right = window or (None, None)
    # So far away that no key is near, but not so far that a distance from there exceeds an int32.
    offset = jnp.clip(jnp.asarray(q_offset).astype(int), -(2**30), 2**30)
    distance = j - i - offset.reshape(-1, 1, 1, 1)
    attends = jnp.ones((), bool)
    if causal:
        attends = attends & (distance <= 0)
    if left is not None:
        attends = attends & (distance >= -left)
    if right is not None:
        attends = attends & (distance <= right)
    return attends


def _members(i: jax.Array, j: jax.Array, segment_ids: Any, q_lengths: Any, kv_lengths: Any) -> jax.Array:
    """The mask of segments and lengths: True where key j is of the segment of query i, and neither is padding."""
    attends = jnp.ones((), bool)
    if segment_ids is not None:
        pair = (segment_ids, segment_ids) if hasattr(segment_ids, "shape") else segment_ids
        q_ids, kv_ids = (jnp.asarray(ids).reshape(math.prod(ids.shape[:-1]), 1, ids.shape[-1]) for ids in pair)
        attends = q_ids[..., :, None] == kv_ids[..., None, :]
    if q_lengths is not None:
        attends = attends & (i < jnp.asarray(q_lengths).reshape(-1, 1, 1, 1))
    if kv_lengths is not None:
        attends = attends & (j < jnp.asarray(kv_lengths).reshape(-1, 1, 1, 1))
    return attends


def _softmax(s: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """exp(s - logsumexp) of the shape of s[..., S], and logsumexp[..., 1]: along the last dim, which both keep.

    A sink is one more logit of each row, without a weight: `sinks` broadcasts to [..., 1]. A row of -inf alone gets
    weights of 0 and a logsumexp of -inf.
    """
    top = jnp.max(s, axis=-1, initial=-jnp.inf, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    # Both results are the same for every `top`, and so are their derivatives.
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    weights = jnp.exp(s - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    # Of a row of -inf alone neither 1 / total nor log(total) may be differentiated: the `where` outside is too late.
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return weights / total, jnp.where(empty, -jnp.inf, jnp.log(total) + top)


def _key_data(key: Any) -> jax.Array:
    """uint32[2], the data of a typed key; a raw key is its own data."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
