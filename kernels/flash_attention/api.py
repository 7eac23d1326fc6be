"""The public function: checks, defaults, and leading dims."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.lang.tiles import describe

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | jax.Array = 0,
    return_logsumexp: Literal[False] = False,
    target: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> jax.Array: ...
@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | jax.Array = 0,
    return_logsumexp: Literal[True],
    target: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | jax.Array = 0,
    return_logsumexp: bool = False,
    target: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, softmax(scale * query keyᵀ) value, without the score matrix in memory.

    Head n of the query reads head n // (N / K) of key and value (grouped-query attention). Logits and softmax are in
    float32 (float64 for float64 inputs). Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
      query: [*B, T, N, H], float32, bfloat16, float16 or float64.
      key: [*B, S, K, H] of the same dtype; K divides N.
      value: [*B, S, K, Hv] of the same dtype.
      causal: query t attends to the keys s <= t + q_offset (top-left aligned at offset 0, as in jax.nn).
      scale: of the logits; H ** -0.5 if None.
      q_offset: the position of the first query among the keys, in elements: an int (static), or an integer array of
        shape () or [*B]. Only `causal` looks at it.
      return_logsumexp: return (out, logsumexp).
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_q: queries of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_k: keys of a tile.

    Returns:
      out[*B, T, N, Hv] in the query's dtype; a row that attends to nothing is 0. With `return_logsumexp` also
      the logsumexp of its logits (natural logarithm), [*B, T, N] in float32, -inf for such a row.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.flash_attention import flash_attention
      >>> q = k = v = jnp.ones((2, 100, 4, 32))
      >>> flash_attention(q, k, v, causal=True).shape
      (2, 100, 4, 32)
    """
    batch = _check(query, key, value)
    offsets, static_offset = _offset(q_offset, batch, query.shape[-3], key.shape[-3])
    arrays = query, key, value
    if len(batch) != 1:
        arrays = tuple(x.reshape(math.prod(batch), *x.shape[-3:]) for x in arrays)
    out, logsumexp = flash_attention_forward(
        *arrays,
        offsets,
        scale=1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale,
        causal=causal,
        static_offset=static_offset,
        return_logsumexp=return_logsumexp,
        target=target,
        block_q=block_q,
        block_k=block_k,
    )
    if len(batch) != 1:
        out = out.reshape(*batch, *out.shape[1:])
        logsumexp = logsumexp.reshape(*batch, *logsumexp.shape[1:]) if return_logsumexp else logsumexp
    return (out, logsumexp) if return_logsumexp else out


def _check(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    """The leading dims, if the three arrays fit."""
    arrays = {"query": query, "key": key, "value": value}
    shapes: list[tuple[int, ...]] = [getattr(x, "shape", ()) for x in arrays.values()]
    fits = len(shapes[0]) >= 3 and len(shapes[0]) == len(shapes[1]) == len(shapes[2])
    if fits:
        (*batch, _, heads, width), (*batch_k, keys, groups, width_k), (*batch_v, keys_v, groups_v, _) = shapes
        fits = batch == batch_k == batch_v and width == width_k and (keys, groups) == (keys_v, groups_v)
        fits = fits and (heads % groups == 0 if groups else heads == 0)
    if fits and query.dtype == key.dtype == value.dtype and query.dtype in _DTYPES:
        return shapes[0][:-3]
    raise ArgumentError(
        "the arrays of flash_attention do not fit",
        expected="query[*B, T, N, H], key[*B, S, K, H], value[*B, S, K, Hv] of one float dtype of at least 16 bits, "
        "K dividing N",
        got=", ".join(f"{name} = {describe(x)}" for name, x in arrays.items()),
        fix="the layout is batch, time, heads, width; cast with .astype",
    )


def _offset(q_offset: Any, batch: tuple[int, ...], queries: int, keys: int) -> tuple[jax.Array | None, int]:
    """The offsets as (one for each element of the batch, one for all), of which one is None or 0.

    From -queries down a query sees no key, from keys up each sees all: clamped to these, positions fit an int32.
    """
    if type(q_offset) is int:
        return None, max(-queries, min(q_offset, keys))
    dtype: Any = getattr(q_offset, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or q_offset.shape not in ((), batch):
        raise ArgumentError(
            "q_offset of flash_attention must be an integer, or integers",
            expected=f"an int, or an integer array of shape () or {list(batch)}",
            got=f"q_offset = {describe(q_offset)}",
            fix="one offset for all of the batch, or one for each element of it",
        )
    wide = jnp.asarray(q_offset, jax.dtypes.canonicalize_dtype(jnp.int64))
    clamped = jnp.clip(wide, -queries, keys).astype(jnp.int32)
    return jnp.broadcast_to(clamped, batch).reshape(-1), 0
