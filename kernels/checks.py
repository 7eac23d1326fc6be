"""Shared parts of the public functions of kernels: checks of arrays, and leading dims made one."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.authoring import check_sizes, describe, hide_frames
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
    """Raise an `ArgumentError` that shows the arrays, unless they fit and are of known sizes."""
    check_sizes(function, arrays)
    if fits:
        return
    got = ", ".join(f"{name} = {describe(x)}" for name, x in arrays.items())
    raise ArgumentError(f"the arrays of {function} do not fit", expected=expected, got=got, fix=fix)


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
