"""Shared parts of the public functions of kernels: checks of arrays, and leading dims made one."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError

hide_frames(__file__)


def is_float(x: Any) -> bool:
    """True if x is an array of a float dtype that the kernels take."""
    return getattr(x, "dtype", None) in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


def is_integer(x: Any) -> bool:
    """True if x is an array of integers."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)


def as_real(value: Any) -> float | None:
    """A real number as a float; None for any other value, and for a number that is too large."""
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return None


def require(fits: bool, function: str, *, expected: str, fix: str, **arrays: Any) -> None:
    """Raise an `ArgumentError` that shows the arrays, unless they fit."""
    if fits:
        return
    got = ", ".join(f"{name} = {describe(x)}" for name, x in arrays.items())
    lists = [name for name, x in arrays.items() if isinstance(x, list | tuple)]
    fix = f"make an array of a list: jnp.asarray({lists[0]}); {fix}" if lists else fix
    raise ArgumentError(f"the arrays of {function} do not fit", expected=expected, got=got, fix=fix)


def lies_in(value: Any, low: float, high: float) -> bool:
    """True for a real number from low to high, both included; NaN is in no interval."""
    number = as_real(value)
    return number is not None and low <= number <= high


def refusal(
    function: str, name: str, expected: str, argument: Any, fix: str, *, got: str | None = None
) -> ArgumentError:
    """The error for the caller to raise: "{function} cannot take this {name}".

    Args:
      function: the public function.
      name: of its argument.
      expected: the values that it takes.
      argument: the value that came.
      fix: a way out.
      got: words in the place of `name = describe(argument)`.
    """
    got = f"{name} = {describe(argument)}" if got is None else got
    return ArgumentError(f"{function} cannot take this {name}", expected=expected, got=got, fix=fix)


def scale_of_scores(function: str, argument: Any, width: int) -> float:
    """The scale of dot products of vectors of `width` numbers; width ** -0.5 for None."""
    if argument is None:
        return 1 / math.sqrt(max(width, 1))
    number = as_real(argument)
    if number is not None:
        return number
    fix = "it is static; multiply the query by one that is traced"
    raise refusal(function, "scale", "a number, or None", argument, fix)


def softcap_of_scores(function: str, argument: Any) -> float | None:
    """The softcap, checked. Above 1e30, score / softcap would be a subnormal number, which hardware may make 0."""
    if argument is None:
        return None
    if argument is not True and lies_in(argument, 1e-30, 1e30):
        return float(argument)
    fix = "leave it out: it bounds the scores"
    raise refusal(function, "softcap", "a number from 1e-30 to 1e30, or None", argument, fix)


def sinks_of_heads(function: str, array: Any, heads: int) -> Any:
    """The sinks, float[heads]; None if absent."""
    if array is None or (is_float(array) and array.shape == (heads,)):
        return array
    raise refusal(function, "sinks", f"float[{heads}], a logit for each head", array, "cast with .astype")


def as_int32(integers: Any) -> jax.Array:
    """Integers of any dtype as int32, clamped to the range of int32.

    An array of NumPy is clamped by NumPy: without 64-bit types JAX would cut its upper bits off.
    """
    wide, narrow = jnp.iinfo(integers.dtype), jnp.iinfo(jnp.int32)
    library: Any = jnp if isinstance(integers, jax.Array) else np
    if wide.max > narrow.max:
        integers = library.clip(integers, max(wide.min, narrow.min), narrow.max)
    return jnp.asarray(integers.astype(np.int32))


def narrowed(integers: Any) -> Any:
    """Integers as int32 if int32 holds them for certain, otherwise unchanged."""
    if np.can_cast(integers.dtype, np.int32):
        return integers.astype(np.int32)
    concrete = not isinstance(integers, jax.Array)
    return integers.astype(np.int32) if concrete and ((integers >= -(2**31)) & (integers < 2**31)).all() else integers


def as_rows(x: Any) -> jax.Array:
    """x[*B, C] as [R, C]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
