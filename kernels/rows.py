"""What the kernels of this library share that work on rows: the arrays they take, and coarse blocks for CPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.errors import ArgumentError
from tilekern.ir.core import cdiv
from tilekern.lang.tiles import describe

# The elements of a tile on a CPU: enough work for all threads, and few enough to stay in the cache.
TILE_ELEMENTS = 1 << 20


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


def like_first(x: Any, *others: Any) -> jax.ShapeDtypeStruct:
    """The `out_type` of a kernel whose output is like its first input."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def coarse(rows: int, columns: int) -> tuple[int, int]:
    """Blocks for an array [rows, columns] on a CPU: whole rows if possible, in even portions."""
    block_columns = max(1, min(columns, TILE_ELEMENTS))
    portions = cdiv(rows, TILE_ELEMENTS // block_columns)
    return max(1, cdiv(rows, max(1, portions))), block_columns


def coarse_blocks(x: Any, *others: Any) -> dict[str, int]:
    """The schedule for CPUs of a kernel whose first input is x[R, C]."""
    block_rows, block_columns = coarse(*x.shape)
    return {"block_rows": block_rows, "block_columns": block_columns}
