"""Conversions between the forms of vectors."""

from __future__ import annotations

import numpy as np
import pytest

from tilekern.ir.types import DTYPES
from tilekern.lower.mosaic.chip import LANES
from tilekern.lower.mosaic.emit.vectors import repeat_column, to_form
from tilekern.lower.mosaic.plan.vector_forms import shape_in

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.itemsize <= 4])
@pytest.mark.parametrize("length", [1, 5, 128, 200])
def test_conversions_are_inverse(name: str, length: int) -> None:
    row = np.arange(length).reshape(1, length).astype(DTYPES[name])
    column = np.asarray(to_form(row, "column"))
    assert (column.shape, column.dtype) == (shape_in("column", length), row.dtype)
    assert (column == row.T).all()
    back = np.asarray(to_form(column, "row"))
    assert back.shape == row.shape and (back == row).all() and back.dtype == row.dtype


@pytest.mark.parametrize("width", [1, 40, 128, 200, 256])
@pytest.mark.parametrize("name", ["f32", "bool", "bf16"])
def test_a_column_becomes_a_tile(width: int, name: str) -> None:
    column = np.repeat(np.arange(8).reshape(8, 1), LANES, 1).astype(DTYPES[name])
    tile = np.asarray(repeat_column(column, width))
    assert tile.shape == (8, width) and tile.dtype == column.dtype and (tile == column[:, :1]).all()
