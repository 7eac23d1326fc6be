"""Numbers in a kernel: what is of 32 bits there, though the language has it narrower."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.types import BOOL, F32, I32, DType, kind_of


def stored_dtype(dtype: DType) -> DType:
    """How memory holds a dtype: a bool takes 32 bits in VMEM, and as a number it has all that those have."""
    return I32 if dtype == BOOL else dtype


def as_stored(x: Any) -> Any:
    """Values as memory holds them."""
    return jnp.where(x, 1, 0) if x.dtype == BOOL else x


def select_wide(keep: Any, x: Any, other: Any) -> Any:
    """`x` where `keep` holds, else `other`, in 32 bits: a mask of int32 comparisons has no layout for narrow tiles.

    Nor does Mosaic choose between narrow scalars; MLIR would make such a choice of one between widened scalars, so
    that these are chosen by what makes up their difference.
    """
    dtype: DType = np.dtype(x.dtype)
    wide = wide_dtype(dtype)
    first, second = x.astype(wide), jnp.broadcast_to(other.astype(wide), x.shape)
    if x.shape or wide == dtype:
        return jnp.where(keep, first, second).astype(dtype)
    if kind_of(dtype) == "float":
        first, second = (lax.bitcast_convert_type(n, jnp.int32) for n in (first, second))
        return lax.bitcast_convert_type(jnp.where(keep, first, second), jnp.float32).astype(dtype)
    return (second + jnp.where(keep, first - second, jnp.zeros_like(first))).astype(dtype)


def wide_dtype(dtype: DType) -> DType:
    """The dtype of 32 bits that has all numbers of a dtype."""
    if dtype.itemsize >= 4:
        return dtype
    return {"float": F32, "signed": I32, "unsigned": np.dtype(np.uint32), "bool": I32}[kind_of(dtype)]
