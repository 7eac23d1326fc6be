"""Dtypes of values in VMEM and in registers: bools, and narrow scalars, take 32 bits there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.types import BOOL, F32, I32, DType, kind_of


def stored_dtype(dtype: DType) -> DType:
    """The dtype in which VMEM holds a dtype: int32 for bools, which take 32 bits there in any case."""
    return I32 if dtype == BOOL else dtype


def as_stored(x: Any) -> Any:
    """The array in its stored dtype: bools as 0 and 1."""
    return jnp.where(x, 1, 0) if x.dtype == BOOL else x


def select_wide(keep: Any, x: Any, y: Any) -> Any:
    """`x` where `keep` holds, else `y`, selected in 32 bits.

    Mosaic cannot select narrow tiles by a mask of int32 comparisons, nor narrow scalars at all. For scalars a select of
    widened operands is not enough, since MLIR folds it back into a narrow one: floats are selected by their bits, and
    integers by adding the selected difference.
    """
    dtype: DType = np.dtype(x.dtype)
    wide = wide_dtype(dtype)
    first, second = x.astype(wide), jnp.broadcast_to(y.astype(wide), x.shape)
    if x.shape or wide == dtype:
        return jnp.where(keep, first, second).astype(dtype)
    if kind_of(dtype) == "float":
        first, second = (lax.bitcast_convert_type(n, jnp.int32) for n in (first, second))
        return lax.bitcast_convert_type(jnp.where(keep, first, second), jnp.float32).astype(dtype)
    return (second + jnp.where(keep, first - second, jnp.zeros_like(first))).astype(dtype)


def wide_dtype(dtype: DType) -> DType:
    """The 32-bit dtype that represents all values of a dtype."""
    if dtype.itemsize >= 4:
        return dtype
    return {"float": F32, "signed": I32, "unsigned": np.dtype(np.uint32), "bool": I32}[kind_of(dtype)]
