"""The definitions of rms_norm and add_rms_norm, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    x: jax.Array, weight: jax.Array | None = None, *, eps: float = 1e-6, offset: float = 0.0, dtype: Any = None
) -> jax.Array:
    """x / √(mean x² + eps) * (weight + offset) over the last axis, in the dtype of x.

    Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    out = wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        out = out * (weight.astype(wide.dtype) + offset)
    return out.astype(x.dtype)


def add_reference(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference` of x + residual, and x + residual; the sum is rounded to the dtype of x."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    total = (x.astype(wide) + residual.astype(wide)).astype(x.dtype)
    return reference(total, weight, eps=eps, offset=offset, dtype=dtype), total
