"""Products with the arguments of `jax.lax` and `jax.nn`: of groups of rows, and of quantised numbers with scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, is_integer, refusal, require
from tilekern.kernels.ragged_dot.api import ragged_dot as ragged_dot_of_kernel
from tilekern.kernels.symbolic_rows import over_rows
from tilekern.nn.promotion import algorithm_of

hide_frames(__file__)


@takes_python_numbers
def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """lhs[rows of group g] @ rhs[g] for consecutive groups of rows, as `jax.lax.ragged_dot`.

    Products of float32 multiply as float32, and all sums are in float32 (float64 for float64).
    `tilekern.kernels.ragged_dot.ragged_dot` takes quantised operands with scales.

    Args:
      lhs: [M, K], float32, bfloat16, float16 or float64.
      rhs: [G, K, N] of the same dtype.
      group_sizes: integers [G]. Rows after the last group are 0 in the result.
      precision: a `jax.lax.Precision`, all of which exact products satisfy.
      preferred_element_type: dtype of the result; None for that of lhs.
      group_offset: None.
      out_sharding: None: the result is divided as the operands are.

    Returns:
      out[M, N].

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or an argument is given that is None above.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import ragged_dot
      >>> rhs = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
      >>> ragged_dot(jnp.ones((5, 1)), rhs, jnp.array([2, 0, 1])).ravel()
      Array([  1.,   1., 100.,   0.,   0.], dtype=float32)
    """
    for name, value in (("group_offset", group_offset), ("out_sharding", out_sharding)):
        if value is not None:
            fix = "slice the groups" if name == "group_offset" else "place the result with jax.sharding.reshard"
            raise refusal("ragged_dot", name, f"{name} = None", value, fix)
    algorithm_of("ragged_dot", precision, exact=True)
    x, matrices, sizes = (jnp.asarray(a) for a in (lhs, rhs, group_sizes))
    fits = is_float(x) and x.dtype == matrices.dtype and is_integer(sizes)
    require(
        fits and (x.ndim, matrices.ndim, sizes.ndim) == (2, 3, 1),
        "ragged_dot",
        expected="lhs[M, K] and rhs[G, K, N] of one float dtype of at least 16 bits, integer group_sizes[G]",
        fix="jax.vmap maps over leading dims; cast with .astype",
        lhs=x,
        rhs=matrices,
        group_sizes=sizes,
    )
    return ragged_dot_of_kernel(x, matrices, sizes, out_dtype=preferred_element_type)


@takes_python_numbers
def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: Any = jnp.float32,
) -> jax.Array:
    """(lhs * lhs_scales) @ (rhs * rhs_scales)ᵀ for each element of a batch, as `jax.nn.scaled_matmul`.

    Each scale belongs to a block of numbers along the inner dim. Numbers are multiplied exactly. Products of a block
    are summed in float32 (of int8 in int32), then scaled and added in float32. Every GPU, TPU and CPU computes it, for
    blocks of any size that divides K. Scales, and operands of at least 16 bits, have derivatives.

    Args:
      lhs: [B, M, K] of float8_e4m3fn, float8_e5m2, float4_e2m1fn, int8, int4, or a float dtype of at least 16 bits.
      rhs: [B, N, K] of such a dtype.
      lhs_scales: floats [B, M, K / block].
      rhs_scales: floats [B, N, K / block].
      preferred_element_type: dtype of the result: float32, bfloat16, float16 or float64.

    Returns:
      out[B, M, N].

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import scaled_matmul
      >>> lhs, rhs = jnp.ones((1, 1, 4), jnp.float8_e4m3fn), jnp.full((1, 1, 4), 2, jnp.float8_e4m3fn)
      >>> scaled_matmul(lhs, rhs, jnp.array([[[1.0, 10.0]]]), jnp.ones((1, 1, 2)))
      Array([[[44.]]], dtype=float32)
    """
    x, w, x_scales, w_scales = (jnp.asarray(a) for a in (lhs, rhs, lhs_scales, rhs_scales))
    fits = x.ndim == w.ndim == x_scales.ndim == w_scales.ndim == 3
    fits = fits and x.shape[::2] == w.shape[::2] and x_scales.shape[::2] == w_scales.shape[::2]
    fits = fits and x_scales.shape[:2] == x.shape[:2] and w_scales.shape[:2] == w.shape[:2]
    fits = fits and x_scales.shape[2] > 0 and x.shape[2] % x_scales.shape[2] == 0
    require(
        fits and all(jnp.issubdtype(s.dtype, jnp.floating) for s in (x_scales, w_scales)),
        "scaled_matmul",
        expected="lhs[B, M, K], rhs[B, N, K], float lhs_scales[B, M, K / block] and rhs_scales[B, N, K / block]",
        fix="the inner dim comes last; jax.vmap maps over more leading dims",
        lhs=x,
        rhs=w,
        lhs_scales=x_scales,
        rhs_scales=w_scales,
    )
    batch, rows, inner = x.shape
    if jax.export.is_symbolic_dim(batch):

        def of_chunk(_: Any, *arrays: jax.Array) -> jax.Array:
            return scaled_matmul(*arrays, preferred_element_type=preferred_element_type)

        return over_rows(of_chunk, x, w, x_scales, w_scales)
    out = ragged_dot_of_kernel(
        x.reshape(batch * rows, inner),
        w,
        jnp.full(batch, rows, jnp.int32),
        transpose_rhs=True,
        lhs_scale=x_scales.reshape(batch * rows, -1),
        rhs_scale=w_scales,
        out_dtype=preferred_element_type,
    )
    return out.reshape(batch, rows, w.shape[1])
