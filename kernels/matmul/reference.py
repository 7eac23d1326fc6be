"""The definitions of `matmul`, `fused_matmul` and `symmetric_matmul`, in plain jnp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def reference(x: jax.Array, w: jax.Array) -> jax.Array:
    """out[*B, M, N] = x[*B, M, K] @ w[*B, K, N], in the dtype of x; sums in float32 (float64; int32)."""
    wide = jnp.int32 if not jnp.issubdtype(x.dtype, jnp.floating) else jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, w, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)


def fused_reference(
    x: jax.Array,
    w: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any],
    transpose_x: bool = False,
    transpose_w: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """epilogue(x @ w, *operands) in the dtype of x, computed in `dtype`; None: float32 (float64 for float64)."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    left, right = (x.mT if transpose_x else x), (w.mT if transpose_w else w)
    product = jnp.matmul(left, right, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return epilogue(product, *(o.astype(wide) for o in operands)).astype(x.dtype)


def symmetric_reference(
    x: jax.Array,
    added: jax.Array | None = None,
    *,
    scale: float = 1.0,
    scale_added: float = 1.0,
    dtype: Any = None,
) -> jax.Array:
    """scale x xᵀ + scale_added added in the dtype of x, computed in `dtype`; None: float32 (float64 for float64)."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST
    out = scale * jnp.matmul(x, x.mT, preferred_element_type=wide, precision=precision)
    return (out if added is None else out + scale_added * added.astype(wide)).astype(x.dtype)
