"""Softmax and its logarithm with the arguments of `jax.nn`: any axes, and masks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, refusal, require
from tilekern.kernels.softmax.api import log_softmax as log_softmax_of_kernel
from tilekern.kernels.softmax.api import softmax as softmax_of_kernel

hide_frames(__file__)


@takes_python_numbers
def softmax(x: ArrayLike, axis: int | Sequence[int] | None = -1, where: ArrayLike | None = None) -> jax.Array:
    """exp(x) / Σ exp(x) over axes, as `jax.nn.softmax`, computed in float32 (float64 for float64).

    Args:
      x: numbers of any shape; integers become floats.
      axis: an axis, or several, or None for all.
      where: bool that broadcasts to x. Elements where it is False count nothing, and are 0 in the result.

    Returns:
      An array like x. NaN, +inf, or nothing but -inf make their whole row NaN. A row without an element that counts
      is 0.

    Raises:
      tilekern.errors.ArgumentError: axes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import softmax
      >>> softmax(jnp.zeros((2, 2)), axis=None)[0]
      Array([0.25, 0.25], dtype=float32)
      >>> softmax(jnp.zeros(4), where=jnp.array([True, False, True, False]))
      Array([0.5, 0. , 0.5, 0. ], dtype=float32)
    """
    return _over("softmax", softmax_of_kernel, x, axis, where, 0)


@takes_python_numbers
def log_softmax(x: ArrayLike, axis: int | Sequence[int] | None = -1, where: ArrayLike | None = None) -> jax.Array:
    """x - ln Σ exp(x) over axes, as `jax.nn.log_softmax`, computed in float32 (float64 for float64).

    Args:
      x: numbers of any shape; integers become floats.
      axis: an axis, or several, or None for all.
      where: bool that broadcasts to x. Elements where it is False count nothing, and are -inf in the result.

    Returns:
      An array like x. NaN, +inf, or nothing but -inf make their whole row NaN. A row without an element that counts
      is -inf.

    Raises:
      tilekern.errors.ArgumentError: axes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import log_softmax
      >>> log_softmax(jnp.array([[0.0, -200.0]]))
      Array([[   0., -200.]], dtype=float32)
    """
    return _over("log_softmax", log_softmax_of_kernel, x, axis, where, -jnp.inf)


def _over(name: str, function: Callable[[jax.Array], jax.Array], x: Any, axis: Any, where: Any, masked: float) -> Any:
    """A function of rows over the axes, with a number in the place of masked elements."""
    array = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jax.eval_shape(jnp.exp, array).dtype)
    expected = "numbers of a real dtype; floats of at least 16 bits"
    require(is_float(array), name, expected=expected, fix="cast with .astype", x=array)
    axes = _axes(name, axis, array.ndim)
    mask = None if where is None else _mask(name, where, array.shape)
    masked_array = array if mask is None else jnp.where(mask, array, -jnp.inf)
    last = jnp.moveaxis(masked_array, axes, range(array.ndim - len(axes), array.ndim))
    rows = last.reshape(*last.shape[: array.ndim - len(axes)], math.prod(array.shape[a] for a in axes))
    out = jnp.moveaxis(function(rows).reshape(last.shape), range(array.ndim - len(axes), array.ndim), axes)
    return out if mask is None else jnp.where(mask, out, masked)


def _axes(name: str, axis: Any, rank: int) -> tuple[int, ...]:
    try:
        several = range(rank) if axis is None else cast(Any, axis if isinstance(axis, tuple | list) else (axis,))
        axes = list(map(operator.index, several))
    except TypeError:
        axes = [rank]
    if all(-rank <= a < rank for a in axes) and len({a % max(rank, 1) for a in axes}) == len(axes):
        return tuple(a % rank for a in axes)
    of_array = f"ints in [{-rank}, {rank}), each once, or None for all", "leave it out for the last axis"
    of_number = "at least one dim, or axis=None", "jnp.atleast_1d makes an array of one element"
    expected, fix = of_array if rank else of_number
    got = f"axis = {describe(axis)}" + ("" if rank else ", for a number")
    raise ArgumentError(f"the axis of {name} is not one of the array", expected=expected, got=got, fix=fix)


def _mask(name: str, where: Any, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(where)
    lead = (1,) * (len(shape) - mask.ndim)
    if mask.dtype == jnp.bool_ and len(lead) + mask.ndim == len(shape):
        spread = (*lead, *mask.shape)
        if all(n in (1, m) for n, m in zip(spread, shape, strict=True)):
            return mask.reshape(spread)
    raise refusal(name, "where", f"bool that broadcasts to {list(shape)}", where, "compare, such as numbers > 0")
