"""Conversions between the two forms of vectors; see `plan/vector_forms.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tilekern.ir.core import cdiv
from tilekern.ir.types import BOOL
from tilekern.lower.mosaic.chip import LANES
from tilekern.lower.mosaic.plan.vector_forms import Form
from tilekern.lower.mosaic.stored_dtypes import as_stored, wide_dtype


def to_form(array: Any, form: Form) -> Any:
    """A vector in `form`, converted from the opposite form."""
    wide = as_stored(array).astype(wide_dtype(array.dtype))
    converted = jnp.broadcast_to(wide, (LANES, wide.shape[1])).T if form == "column" else wide.T[:1]
    return converted != 0 if array.dtype == BOOL else converted.astype(array.dtype)


def repeat_column(column: Any, width: int) -> Any:
    """The tile of `width` equal lanes that repeats a column."""
    if column.dtype == BOOL:
        return repeat_column(as_stored(column), width) != 0
    whole = cdiv(width, LANES)
    tile = column if whole == 1 else jnp.concatenate([column] * whole, axis=1)
    return tile if tile.shape[1] == width else tile[:, :width]
