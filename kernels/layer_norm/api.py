"""The public function: checks and leading dims."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_rows, is_float, require
from tilekern.kernels.layer_norm.kernel import layer_norm_forward

hide_frames(__file__)


@takes_python_numbers
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> jax.Array:
    """(x - mean) / √(var + eps) * weight + bias over the last axis, computed in float32 (float64 for float64).

    Source: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, equations 3 and 4, with eps; var is the mean of
    (x - mean)².

    Args:
      x: [*B, C], float32, bfloat16, float16 or float64.
      weight: [C] of any of these dtypes; None for ones.
      bias: [C] of any of these dtypes; None for zeros.
      eps: added to the variance.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_columns: elements of a row in a tile. A longer row is read twice.

    Returns:
      An array like x.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.layer_norm import layer_norm
      >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.array([0.0, 5.0]), eps=0.0)
      Array([[-1.,  6.]], dtype=float32)
    """
    fits = is_float(x) and x.ndim > 0
    fits = fits and all(v is None or (is_float(v) and v.shape == x.shape[-1:]) for v in (weight, bias))
    require(
        fits,
        "layer_norm",
        expected="x[*B, C], weight[C] and bias[C] (or None), of float dtypes of at least 16 bits",
        fix="the last axis is normalised: move it there; cast with .astype",
        x=x,
        weight=weight,
        bias=bias,
    )
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    out = layer_norm_forward(
        as_rows(x), weight, bias, eps=eps, target=target, block_rows=block_rows, block_columns=block_columns
    )
    return out.reshape(x.shape)
