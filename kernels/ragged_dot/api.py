"""The public functions: checks, and the ends of the groups."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_int32, is_float
from tilekern.kernels.conventions import Launch, check_launch
from tilekern.kernels.ragged_dot.accumulated import ragged_contracting_into, ragged_dot_into
from tilekern.kernels.ragged_dot.arguments import (
    check_accumulate,
    check_contracting,
    check_groups,
    check_scales,
    ends_of,
    result_dtype,
    with_scales,
)
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward
from tilekern.kernels.symbolic_rows import ends_within, over_rows, sum_over_rows

hide_frames(__file__)


@takes_python_numbers
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    accumulate: jax.Array | None = None,
    out_dtype: Any = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """lhs[rows of group g] @ rhs[g] for consecutive groups of rows, as `jax.lax.ragged_dot`, accumulated in float32.

    The products of a mixture of experts, when tokens are sorted by expert. A border between groups may lie anywhere,
    groups may be empty, and the rows and the matrix of a group (NaN, say) do not touch another group.

    Operands of 8 or 4 bits come from `tilekern.kernels.quantization.quantize`, with their scales. One operand
    may have scales, or both. Numbers are multiplied exactly. Products are summed in int32 (two operands of integers) or
    float32 over a block of the inner dim with one scale of each operand; the sums are scaled and added in float32. Two
    operands of integers take blocks of less than 131,072 numbers. If an operand has at least 16 bits, scales of blocks
    of less than 16 numbers along the inner dim are applied in memory, and round to that dtype.

    Derivatives of any order, in both modes, are grouped products, too; the gradient of rhs is `ragged_contracting_dot`.
    Operands of 8 and 4 bits have no derivatives, but their scales have. Cotangents are rounded to the dtype of the
    operand by which they are multiplied.

    Args:
      lhs: [M, K], float32, bfloat16, float16 or float64 (accumulated in float64); int8, float8_e4m3fn, float8_e5m2,
        int4 or float4_e2m1fn.
      rhs: [G, K, N] of the same dtype, or of one of 8 or 4 bits; [G, N, K] with `transpose_rhs`.
      group_sizes: integers [G]: the first group_sizes[0] rows are group 0's, the next group_sizes[1] group 1's, and
        so on. Rows after the last group are 0 in the result. Groups are cut at M, for sizes of any magnitude. A group
        of negative size is empty.
      transpose_rhs: multiply by rhs[g] transposed, which is read in place.
      lhs_scale: of lhs, floats [M or 1, K / block]: each number of a block is multiplied by its scale.
      rhs_scale: of rhs, floats with as many dims as rhs; each dim divides the dim of rhs: [G, 1, N] for a scale of
        each column, [G, K / 128, N / 128] for blocks of 128 × 128. A dim of size 1 has one scale for all.
      accumulate: [M, N] of floats, to which the product is added, in place if the array is donated or not used again.
      out_dtype: of the result. None: the dtype of the operand of at least 16 bits, or bfloat16.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: instead of the schedule's, `block_m` rows and `block_n` columns of a tile, `block_k` terms that are summed
        at a time, and a GPU's `num_warps`, `num_stages` and `num_ctas`. They change no result beyond rounding.

    Returns:
      out[M, N] in `out_dtype`, or in the dtype of `accumulate`.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.
      tilekern.errors.NotDifferentiableError: the derivative by an operand of 8 or 4 bits is asked for.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.ragged_dot import ragged_dot
      >>> rhs = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
      >>> ragged_dot(jnp.ones((5, 1)), rhs, jnp.array([2, 0, 1])).ravel()
      Array([  1.,   1., 100.,   0.,   0.], dtype=float32)
      >>> from tilekern.kernels.quantization import quantize
      >>> values, scale = quantize(rhs, (None, 1))
      >>> ragged_dot(jnp.ones((5, 1)), values, jnp.array([2, 0, 1]), rhs_scale=scale).ravel()
      Array([  1.,   1., 100.,   0.,   0.], dtype=float32)
    """
    check_launch("ragged_dot", launch)
    check_groups("ragged_dot", lhs, rhs, group_sizes, transpose_rhs)
    check_scales("ragged_dot", lhs, rhs, lhs_scale, rhs_scale, transpose_rhs)
    shape = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    check_accumulate("ragged_dot", accumulate, out_dtype, shape)
    dtype = result_dtype("ragged_dot", out_dtype, lhs, rhs)
    if 0 in (*shape, lhs.shape[1], rhs.shape[0]):
        return jnp.zeros(shape, dtype) if accumulate is None else accumulate
    all_ends = ends_of(as_int32(group_sizes), lhs.shape[0])
    static: Any = {"transpose_rhs": transpose_rhs, "target": target, **launch}
    plain = lhs_scale is None and rhs_scale is None and lhs.dtype == rhs.dtype and is_float(lhs)
    lhs, rhs, lhs_scale, rhs_scale = with_scales(lhs, rhs, lhs_scale, rhs_scale, transpose_rhs)

    def product(start: Any, lhs: jax.Array, lhs_scale: jax.Array | None, total: jax.Array | None) -> jax.Array:
        ends = ends_within(all_ends, start, lhs.shape[0])
        if total is not None:
            return ragged_dot_into(total, lhs, rhs, ends, lhs_scale, rhs_scale, **static)
        if plain:
            return ragged_dot_forward(lhs, rhs, ends, out_dtype=dtype, **static)
        return scaled_ragged_dot_forward(lhs, rhs, ends, lhs_scale, rhs_scale, out_dtype=dtype, **static)

    return over_rows(product, lhs, lhs_scale, accumulate)


@takes_python_numbers
def ragged_contracting_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    accumulate: jax.Array | None = None,
    out_dtype: Any = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """lhs[rows of group g]ᵀ @ rhs[rows of group g], a matrix for each group, accumulated in float32.

    This is the gradient of `ragged_dot` by its matrices: the mode of `jax.lax.ragged_dot_general` with a ragged
    contracting dim, and `tgmm` of Megablox, which takes lhs as [K, M]. The matrix of an empty group is 0. Rows
    after the last group are ignored. Derivatives of any order, in both modes, are grouped products, too.

    Args:
      lhs: [M, K], float32, bfloat16, float16 or float64 (accumulated in float64).
      rhs: [M, N] of the same dtype.
      group_sizes: integers [G], as of `ragged_dot`.
      accumulate: [G, K, N] of floats, to which the matrices are added, in place if the array is donated or not used
        again. Gradients of several batches add up in float32 this way. Matrices of empty groups stay as they are.
      out_dtype: of the result; None for the dtype of lhs.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: as of `ragged_dot`, but `block_m` rows are summed at a time, and a tile of the result has `block_k` rows
        and `block_n` columns.

    Returns:
      out[G, K, N] in `out_dtype`, or in the dtype of `accumulate`.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.ragged_dot import ragged_contracting_dot
      >>> ragged_contracting_dot(jnp.arange(5.0)[:, None], jnp.ones((5, 1)), jnp.array([2, 0, 2])).ravel()
      Array([1., 0., 5.], dtype=float32)
    """
    check_launch("ragged_contracting_dot", launch)
    check_contracting(lhs, rhs, group_sizes)
    shape = group_sizes.shape[0], lhs.shape[1], rhs.shape[1]
    check_accumulate("ragged_contracting_dot", accumulate, out_dtype, shape)
    dtype = result_dtype("ragged_contracting_dot", out_dtype, lhs, rhs)
    if 0 in shape:
        return jnp.zeros(shape, dtype) if accumulate is None else accumulate
    ends = ends_of(as_int32(group_sizes), lhs.shape[0])
    static: Any = {"target": target, **launch}
    if jax.export.is_symbolic_dim(lhs.shape[0]):
        # Chunks add to float32 (float64), so that sums over rows round once.
        total = jnp.zeros(shape, jnp.promote_types(lhs.dtype, jnp.float32))

        def add(start: jax.Array, total: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return ragged_contracting_into(total, lhs, rhs, ends_within(ends, start, lhs.shape[0]), **static)

        total = sum_over_rows(add, total, lhs, rhs)
        return total.astype(dtype) if accumulate is None else (accumulate + total).astype(accumulate.dtype)
    if accumulate is not None:
        return ragged_contracting_into(accumulate, lhs, rhs, ends, **static)
    return ragged_contracting_forward(lhs, rhs, ends, out_dtype=dtype, **static)
