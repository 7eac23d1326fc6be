"""Shapes of tiles in registers: reshapes between vectors and tiles, and slices of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from tilekern.lower.mosaic.chip import LANES
from tilekern.lower.mosaic.emit.vectors import repeat_column, to_form
from tilekern.lower.mosaic.stored_dtypes import wide_dtype


def register_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tile in registers: a vector is a row."""
    return (1, *shape) if len(shape) == 1 else shape


def _element(x: Any) -> Any:
    """The element of a tile with one element; Mosaic extracts it from 32-bit vectors only."""
    return x.astype(wide_dtype(np.dtype(x.dtype)))[(0,) * x.ndim].astype(x.dtype)


def with_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """The array reshaped; a row becomes a column, and a column a row, by a conversion of vector forms."""
    if x.shape == shape:
        return x
    if not x.shape:
        return jnp.full(shape, x)
    if not shape:
        return _element(x)
    if len(x.shape) == len(shape) == 2 and x.shape == shape[::-1] and 1 in shape:
        if shape[0] == 1:
            return to_form(jnp.broadcast_to(x, (x.shape[0], LANES)), "row")
        return to_form(x, "column")[:, :1]
    return x.reshape(shape)


def indexed_shape(index: Sequence[Any], buffer: Sequence[int]) -> tuple[int, ...]:
    """The shape of `buffer[index]`."""
    shape: list[int] = []
    for i, n in zip(index, buffer, strict=True):
        if isinstance(i, slice):
            shape.append(len(range(*i.indices(n))))
        elif isinstance(i, pl.Slice):
            shape.append(cast(int, i.size))
    return tuple(shape)


def row_along_dim(row: Any, shape: tuple[int, ...], dim: int) -> Any:
    """The tile of `shape` with the row along `dim`, repeated along all other dims."""
    if dim == len(shape) - 1:
        return jnp.broadcast_to(row.reshape((1,) * (len(shape) - 1) + (-1,)), shape)
    if len(shape) == 2:
        return repeat_column(to_form(row, "column"), shape[1])
    column = to_form(row, "column")[:, :1]
    column_shape = [1] * len(shape)
    column_shape[dim] = shape[dim]
    return jnp.broadcast_to(column.reshape(column_shape), shape)
