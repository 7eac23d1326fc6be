"""The definitions of `matmul`, `fused_matmul` and `symmetric_matmul`, in plain jnp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """out[*B, M, N] = lhs[*B, M, K] @ rhs[*B, K, N], in the dtype of lhs; sums in `dtype`.

    None: float32 (float64 for float64; int32 for integers).
    """
    floats = jnp.issubdtype(lhs.dtype, jnp.floating)
    wide = dtype or (jnp.promote_types(lhs.dtype, jnp.float32) if floats else jnp.int32)
    left, right = (lhs.mT if transpose_lhs else lhs), (rhs.mT if transpose_rhs else rhs)
    product = jnp.matmul(left, right, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return product.astype(lhs.dtype)


def fused_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any],
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """epilogue(lhs @ rhs, *operands) in the dtype of lhs, computed in `dtype`; None: float32 (float64 for float64)."""
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    left, right = (lhs.mT if transpose_lhs else lhs), (rhs.mT if transpose_rhs else rhs)
    product = jnp.matmul(left, right, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return epilogue(product, *(o.astype(wide) for o in operands)).astype(lhs.dtype)


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
