"""The public functions: checks and leading dims."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_rows, is_float, require
from tilekern.kernels.rms_norm.kernel import add_rms_norm_forward, rms_norm_forward

hide_frames(__file__)


@takes_python_numbers
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> jax.Array:
    """x / √(mean x² + eps) * (weight + offset) over the last axis, computed in float32 (float64 for float64).

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4, with eps.

    Args:
      x: [*B, C], float32, bfloat16, float16 or float64.
      weight: [C] of any of these dtypes; None for ones (`offset` is then not used).
      eps: added to the mean square.
      offset: added to the weight: 1 for models that store weight - 1, such as Gemma.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_columns: elements of a row in a tile. A longer row is read twice.

    Returns:
      An array like x.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rms_norm import rms_norm
      >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0])).round(4)
      Array([[ 1., -2.]], dtype=float32)
    """
    fits = is_float(x) and x.ndim > 0
    fits = fits and (weight is None or (is_float(weight) and weight.shape == x.shape[-1:]))
    require(
        fits,
        "rms_norm",
        expected="x[*B, C] and weight[C] (or None), of float dtypes of at least 16 bits",
        fix="the last axis is normalised: move it there; cast with .astype",
        x=x,
        weight=weight,
    )
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    out = rms_norm_forward(
        as_rows(x),
        weight,
        eps=eps,
        offset=offset,
        target=target,
        block_rows=block_rows,
        block_columns=block_columns,
    )
    return out.reshape(x.shape)


@takes_python_numbers
def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm(x + residual, weight)` and x + residual, in one pass over memory.

    In a transformer x is the result of attention or of an MLP, residual the stream to which x is added. The sum is
    rounded to the dtype of x before the norm, as if sum and norm were computed one after the other.
    The backward pass keeps the sum and the weight, and nothing else.

    Args:
      x: [*B, C], float32, bfloat16, float16 or float64.
      residual: of the same shape and dtype.
      weight: [C] of any of these dtypes; None for ones (`offset` is then not used).
      eps: added to the mean square.
      offset: added to the weight: 1 for models that store weight - 1, such as Gemma.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_columns: elements of a row in a tile. A longer row is read twice.

    Returns:
      The normalised sum and the sum, two arrays like x.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rms_norm import add_rms_norm
      >>> out, total = add_rms_norm(jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.0]]))
      >>> out.round(4), total
      (Array([[ 1., -1.]], dtype=float32), Array([[ 3., -3.]], dtype=float32))
    """
    fits = is_float(x) and x.ndim > 0
    fits = fits and is_float(residual) and (x.shape, x.dtype) == (residual.shape, residual.dtype)
    fits = fits and (weight is None or (is_float(weight) and weight.shape == x.shape[-1:]))
    require(
        fits,
        "add_rms_norm",
        expected="x[*B, C] and residual[*B, C] of one dtype, weight[C] or None, all of floats of at least 16 bits",
        fix="broadcast with jnp.broadcast_to, cast with .astype",
        x=x,
        residual=residual,
        weight=weight,
    )
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape, x.dtype)
    out, total = add_rms_norm_forward(
        as_rows(x),
        as_rows(residual),
        weight,
        eps=eps,
        offset=offset,
        target=target,
        block_rows=block_rows,
        block_columns=block_columns,
    )
    return out.reshape(x.shape), total.reshape(x.shape)
