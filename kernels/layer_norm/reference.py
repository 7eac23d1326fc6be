"""The definition of layer_norm, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    dtype: Any = None,
) -> jax.Array:
    """(x - mean x) / √(var x + eps) * weight + bias over the last axis, in the dtype of x.

    Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    out = centered / jnp.sqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    if weight is not None:
        out = out * weight.astype(wide.dtype)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return out.astype(x.dtype)
