"""What the public functions of the kernels share: checks of their arrays, and the flattening of leading dims."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.errors import ArgumentError
from tilekern.lang.tiles import describe


def is_float(x: Any) -> bool:
    """Whether x is an array of a float dtype that the kernels take."""
    return getattr(x, "dtype", None) in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


def is_integer(x: Any) -> bool:
    """Whether x is an array of integers."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)


def require(fits: bool, function: str, *, expected: str, fix: str, **arrays: Any) -> None:
    """Raise an `ArgumentError` that shows the arrays, unless they fit."""
    if fits:
        return
    got = ", ".join(f"{name} = {describe(x)}" for name, x in arrays.items())
    raise ArgumentError(f"the arrays of {function} do not fit", expected=expected, got=got, fix=fix)


def as_rows(x: Any) -> jax.Array:
    """x[*B, C] as [R, C]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
