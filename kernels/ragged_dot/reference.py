"""The definitions of the grouped products, in plain jnp: a product of all rows for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.kernels.quantization import dequantize


def reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any = None, transpose_rhs: bool = False
) -> jax.Array:
    """out[M, N] = lhs[M, K] @ rhs[g, K, N] for the rows of group g; the first group_sizes[0] rows are group 0's, etc.

    Rows behind the last group are 0; a group of a negative size is empty. Accumulated in `dtype`: if None in float32,
    in float64 for float64 inputs; in the dtype of lhs. With `transpose_rhs` rhs is given as [G, N, K].
    """
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    rows = jnp.arange(lhs.shape[0])[:, None]

    def add(carry: tuple[jax.Array, jax.Array], group: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (out, start), (matrix, size) = carry, group
        product = jnp.matmul(lhs, matrix, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
        return (jnp.where((rows >= start) & (rows < start + size), product, out), start + size), None

    out = jnp.zeros((lhs.shape[0], rhs.shape[2]), wide)
    (out, _), _ = jax.lax.scan(add, (out, jnp.int32(0)), (rhs, _sizes(lhs, group_sizes)))
    return out.astype(lhs.dtype)


def scaled_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    dtype: Any = jnp.float32,
    out_dtype: Any = None,
    transpose_rhs: bool = False,
) -> jax.Array:
    """`reference` of the operands times their scales, computed in `dtype`; the result in `out_dtype`, or `dtype`."""

    def whole(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        return x.astype(dtype) if scale is None else dequantize(x, scale.astype(wide), dtype)

    wide = jnp.promote_types(dtype, jnp.float32)
    out = reference(whole(lhs, lhs_scale), whole(rhs, rhs_scale), group_sizes, transpose_rhs=transpose_rhs)
    return out.astype(out_dtype or dtype)


def fused_reference(
    lhs: jax.Array,
    rhs: jax.Array | Sequence[jax.Array],
    group_sizes: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any],
    dtype: Any = None,
    transpose_rhs: bool = False,
) -> jax.Array:
    """epilogue(*products, *operands) for `reference` with each of rhs, computed in `dtype` as there.

    An operand [G, 1, N] has a row for each group. Rows behind the last group are 0.
    """
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    matrices = tuple(rhs) if isinstance(rhs, tuple | list) else (cast(jax.Array, rhs),)
    ends = jnp.cumsum(_sizes(lhs, group_sizes))
    group = (jnp.arange(lhs.shape[0])[:, None] >= ends).sum(1)

    def product(matrix: jax.Array) -> jax.Array:
        return reference(lhs.astype(wide), matrix.astype(wide), group_sizes, transpose_rhs=transpose_rhs)

    def of_rows(x: Any) -> jax.Array:
        """An operand for each row; rows behind the last group have one of zeros, also where there is no group."""
        x = jnp.asarray(x)
        return jnp.pad(x[:, 0], ((0, 1), (0, 0)))[jnp.minimum(group, x.shape[0])] if x.ndim == 3 else x

    found = epilogue(*map(product, matrices), *(of_rows(x).astype(wide) for x in operands))
    inside = (group < group_sizes.shape[0])[:, None]
    return jnp.where(inside, jnp.broadcast_to(found, (lhs.shape[0], found.shape[-1])), 0).astype(lhs.dtype)


def contracting_reference(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any = None) -> jax.Array:
    """out[g, K, N] = lhs[rows, K]ᵀ @ rhs[rows, N] for the rows of group g, accumulated as in `reference`."""
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    rows = jnp.arange(lhs.shape[0])[:, None]
    sizes = _sizes(lhs, group_sizes)
    ends = jnp.cumsum(sizes)

    def one(begin: jax.Array, end: jax.Array) -> jax.Array:
        left, right = (jnp.where((rows >= begin) & (rows < end), x, 0) for x in (lhs, rhs))
        return jnp.matmul(left.T, right, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)

    return jax.vmap(one)(ends - sizes, ends).astype(lhs.dtype)


def _sizes(lhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sizes that int32 holds the sum of; none is negative."""
    return jnp.clip(group_sizes, 0, lhs.shape[0]).astype(jnp.int32)
