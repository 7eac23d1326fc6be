"""The definition of group_norm, in plain jnp."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def reference(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    batch_dims: int = 1,
    eps: float = 1e-6,
    activation: str | None = None,
    dtype: Any = None,
) -> jax.Array:
    """activation((x - mean) / √(var + eps) * weight + bias) of x[*B, *S, C], in the dtype of x; see `group_norm`.

    Computed in `dtype`; None: float32, or float64 for float64 inputs.
    """
    size = group_size or x.shape[-1] // (num_groups or 32)
    flat = x.reshape(math.prod(x.shape[:batch_dims]), math.prod(x.shape[batch_dims:-1]), x.shape[-1])
    out = definition(flat, weight, bias, size=size, eps=eps, activation=activation, dtype=dtype)
    return out.reshape(x.shape)


def definition(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    size: int,
    eps: float,
    activation: str | None,
    dtype: Any = None,
) -> jax.Array:
    """The `reference` of x[N, S, C], in groups of `size` channels."""
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    groups = wide.reshape(*x.shape[:2], x.shape[2] // size, size)
    centered = groups - jnp.mean(groups, axis=(1, 3), keepdims=True)
    out = centered / jnp.sqrt(jnp.mean(centered * centered, axis=(1, 3), keepdims=True) + eps)
    out = out.reshape(x.shape)
    if weight is not None:
        out = out * weight.astype(wide.dtype)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return (jax.nn.silu(out) if activation == "silu" else out).astype(x.dtype)
