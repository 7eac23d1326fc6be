"""The public functions: checks, the axis, and leading dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_rows, is_float, require
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.kernels.softmax.log import log_softmax_forward

hide_frames(__file__)


@takes_python_numbers
def softmax(
    x: jax.Array,
    axis: int = -1,
    *,
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> jax.Array:
    """exp(x) / Σ exp(x) over an axis, as `jax.nn.softmax`, computed in float32 (float64 for float64).

    Args:
      x: of any rank but 0, float32, bfloat16, float16 or float64.
      axis: the one to sum over; the last is the fast one, others are transposed.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_columns: elements of a row in a tile. A longer row is read twice.

    Returns:
      An array like x. NaN, +inf, or nothing but -inf make their whole row NaN.

    Raises:
      tilekern.errors.ArgumentError: the rank, the dtype or the axis do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.softmax import softmax
      >>> softmax(jnp.zeros((2, 4)))[0]
      Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    _check("softmax", x, axis)
    return _along(softmax_forward, x, axis, target, block_rows, block_columns)


@takes_python_numbers
def log_softmax(
    x: jax.Array,
    axis: int = -1,
    *,
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> jax.Array:
    """x - ln Σ exp(x) over an axis, as `jax.nn.log_softmax`, computed in float32 (float64 for float64).

    Args:
      x: of any rank but 0, float32, bfloat16, float16 or float64.
      axis: the one to sum over; the last is the fast one, others are transposed.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_columns: elements of a row in a tile. A longer row is read twice.

    Returns:
      An array like x. NaN, +inf, or nothing but -inf make their whole row NaN.

    Raises:
      tilekern.errors.ArgumentError: the rank, the dtype or the axis do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.softmax import log_softmax
      >>> log_softmax(jnp.array([0.0, -200.0]))
      Array([   0., -200.], dtype=float32)
    """
    _check("log_softmax", x, axis)
    return _along(log_softmax_forward, x, axis, target, block_rows, block_columns)


def _check(function: str, x: Any, axis: Any) -> None:
    rank = getattr(x, "ndim", 0)
    require(
        rank > 0 and is_float(x),
        function,
        expected="an array of rank 1 or more, of a float dtype of at least 16 bits",
        fix="cast with .astype",
        x=x,
    )
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise ArgumentError(
            f"the axis of {function} is not one of the array",
            expected=f"an int in [{-rank}, {rank})",
            got=f"axis = {describe(axis)}",
            fix="flatten several axes into one with reshape",
        )


def _along(
    forward: Callable[..., jax.Array],
    x: jax.Array,
    axis: int,
    target: str | None,
    block_rows: int | None,
    block_columns: int | None,
) -> jax.Array:
    """The kernel on the rows of an axis."""
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    last = jnp.moveaxis(x, axis, -1)
    out = forward(as_rows(last), target=target, block_rows=block_rows, block_columns=block_columns)
    return jnp.moveaxis(out.reshape(last.shape), -1, axis)
