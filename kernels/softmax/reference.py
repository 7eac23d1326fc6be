"""The definitions of softmax and of its logarithm, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(x: jax.Array, axis: int = -1, *, dtype: Any = None) -> jax.Array:
    """exp(x - max x) / Σ exp(x - max x) over an axis, in the dtype of x.

    Computed in `dtype`: if None in float32, in float64 for float64 inputs. As in `jax.nn.softmax`, NaN, +inf, or
    nothing but -inf make their whole row NaN.
    """
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    weights = jnp.exp(wide - jnp.max(wide, axis=axis, keepdims=True, initial=-jnp.inf))
    return (weights / jnp.sum(weights, axis=axis, keepdims=True)).astype(x.dtype)


def log_reference(x: jax.Array, axis: int = -1, *, dtype: Any = None) -> jax.Array:
    """x - max x - ln Σ exp(x - max x) over an axis, in the dtype of x; computed as `reference`."""
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    shifted = wide - jnp.max(wide, axis=axis, keepdims=True, initial=-jnp.inf)
    return (shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True))).astype(x.dtype)
