"""The definition of attention, in plain jnp, with the whole score matrix."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | jax.Array = 0,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of query[*B, T, N, H] to key[*B, S, K, H] and value[*B, S, K, Hv]; head n reads key head n // (N / K).

    Logits, softmax and products in `dtype`: if None in float32, in float64 for float64 inputs. A row that attends to
    nothing is 0.

    Returns:
      out[*B, T, N, Hv] in the query's dtype, and the logsumexp of the scaled logits [*B, T, N] (natural logarithm; -inf
      for a row that attends to nothing).
    """
    wide = dtype or (jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    queries, heads, width = query.shape[-3:]
    keys, groups = key.shape[-3], key.shape[-2]
    scale = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    k, v = (jnp.repeat(x.astype(wide), heads // max(groups, 1), axis=-2) for x in (key, value))
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("...tnh,...snh->...nts", query.astype(wide), k, precision=exact) * scale
    if causal:
        offset = jnp.asarray(q_offset)[..., None, None, None]
        attends = jnp.arange(queries)[:, None] + offset >= jnp.arange(keys)[None, :]
        scores = jnp.where(attends, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, initial=-jnp.inf, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("...nts,...snh->...tnh", weights / jnp.where(total == 0, 1.0, total), v, precision=exact)
    logsumexp = jnp.moveaxis((jnp.log(total) + top)[..., 0], -2, -1)
    return out.astype(query.dtype), logsumexp
