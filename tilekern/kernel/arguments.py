"""The check of an array argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.ir.types import FOUR_BITS, dtype_name, is_dtype
from tilekern.kernel.signature import check_sizes
from tilekern.lang.tiles import way_out


def check_argument(name: str, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array argument and its dtype, as JAX would canonicalise it; 4-bit dtypes stay.

    Raises:
      ArgumentError: the dtype is none of the language's, or a dim has an unknown size.
    """
    shaped = leaf if _jax.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
    dtype: Any = shaped.dtype
    check_sizes(name, {path: shaped})
    plain = not jnp.issubdtype(dtype, jax.dtypes.extended)
    if plain and np.dtype(dtype) in FOUR_BITS:
        return _of_pairs(name, path, shaped)
    if plain and is_dtype(np.dtype(dtype)):
        return jax.ShapeDtypeStruct(shaped.shape, jax.dtypes.canonicalize_dtype(dtype))
    raise ArgumentError(
        f"{name} cannot take an array of this dtype",
        expected="a float, integer or bool array",
        got=f"{path} = {dtype_name(dtype) if plain else dtype}{list(shaped.shape)}",
        fix=way_out(dtype),
    )


def _of_pairs(name: str, path: str, shaped: Any) -> jax.ShapeDtypeStruct:
    if shaped.shape:
        return jax.ShapeDtypeStruct(shaped.shape, shaped.dtype)
    raise ArgumentError(
        f"{name} cannot take a single number of 4 bits",
        expected=f"an array of {np.dtype(shaped.dtype)} with a dim along which two numbers share a byte",
        got=f"{path} = {np.dtype(shaped.dtype)}[]",
        fix="reshape it to one dim, or cast it with .astype(jnp.int8)",
    )
