"""The definition of `matmul`, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reference(x: jax.Array, w: jax.Array) -> jax.Array:
    """out[M, N] = x[M, K] @ w[K, N], accumulated in float32 (float64; int32 for integers), in the dtype of x."""
    wide = jnp.int32 if not jnp.issubdtype(x.dtype, jnp.floating) else jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, w, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)
