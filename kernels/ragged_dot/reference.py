"""The definitions of the grouped products, in plain jnp: a product of all rows for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.kernels.quantization import dequantize


def reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool = False, dtype: Any = None
) -> jax.Array:
    """out[M, N] = lhs[M, K] @ rhs[g, K, N] for the rows of group g; the first group_sizes[0] rows are group 0's, etc.

    The result has the dtype of lhs. Rows after the last group are 0; a group of negative size is empty. Sums are in
    `dtype`; None: float32, or float64 for float64 inputs. With `transpose_rhs` rhs is given as [G, N, K].
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
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    dtype: Any = jnp.float32,
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
    transpose_rhs: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """out[M, N] = epilogue(*products, *operands), with the `reference` product of lhs and each of rhs in `dtype`.

    An operand [G, 1, N] has a row for each group. Rows after the last group are 0.
    """
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    matrices = tuple(rhs) if isinstance(rhs, tuple | list) else (cast(jax.Array, rhs),)
    ends = jnp.cumsum(_sizes(lhs, group_sizes))
    group = (jnp.arange(lhs.shape[0])[:, None] >= ends).sum(1)

    def product(matrix: jax.Array) -> jax.Array:
        return reference(lhs.astype(wide), matrix.astype(wide), group_sizes, transpose_rhs=transpose_rhs)

    def of_rows(x: Any) -> jax.Array:
        """An operand of groups as [M, N]: 0 in rows after the last group, also if no group exists. Others unchanged."""
        x = jnp.asarray(x)
        return jnp.pad(x[:, 0], ((0, 1), (0, 0)))[jnp.minimum(group, x.shape[0])] if x.ndim == 3 else x

    result = epilogue(*map(product, matrices), *(of_rows(x).astype(wide) for x in operands))
    inside = (group < group_sizes.shape[0])[:, None]
    return jnp.where(inside, jnp.broadcast_to(result, (lhs.shape[0], result.shape[-1])), 0).astype(lhs.dtype)


def contracting_reference(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any = None) -> jax.Array:
    """out[g, K, N] = lhs[rows, K]ᵀ @ rhs[rows, N] for the rows of group g, in the dtype of `lhs`.

    `dtype` is the dtype of the sums, as in `reference`.
    """
    wide = dtype or jnp.promote_types(lhs.dtype, jnp.float32)
    rows = jnp.arange(lhs.shape[0])[:, None]
    sizes = _sizes(lhs, group_sizes)
    ends = jnp.cumsum(sizes)

    def of_group(begin: jax.Array, end: jax.Array) -> jax.Array:
        left, right = (jnp.where((rows >= begin) & (rows < end), x, 0) for x in (lhs, rhs))
        return jnp.matmul(left.T, right, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)

    return jax.vmap(of_group)(ends - sizes, ends).astype(lhs.dtype)


def _sizes(lhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sizes as int32, clamped to [0, M]."""
    return jnp.clip(group_sizes, 0, lhs.shape[0]).astype(jnp.int32)
