"""Atomic updates in VMEM."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ir.funcs import edges
from tilekern.ir.core import Value
from tilekern.ir.memory import Access, Atomic, AtomicKind, Dim, Position
from tilekern.ir.types import DTYPES, F64, RefType, TileType, kind_of
from tilekern.lower.mosaic.emit.memory import combine

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

NUMBERS = [n for n, d in DTYPES.items() if d.itemsize <= 4 and kind_of(d) != "bool"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(("kind", "function"), [("max", np.maximum), ("min", np.minimum)])
def test_extremes(kind: AtomicKind, function: np.ufunc, name: str) -> None:
    """Of all numbers, infinities and NaN included; subnormal ones may be 0."""
    dtype = DTYPES[name]
    numbers = np.asarray(edges(dtype, 64), dtype)
    if kind_of(dtype) == "float":
        least = np.float64(ml_dtypes.finfo(dtype).smallest_normal)
        numbers = numbers[~(abs(numbers.astype(F64)) < least) | (numbers == 0)]
    old, new = np.meshgrid(numbers, numbers)
    ref, tile = RefType(old.shape, dtype, "zeros"), TileType(old.shape, dtype)
    access = Access(tuple(Dim("block", Position(), n) for n in old.shape))
    op = Atomic(operands=(Value(ref), Value(tile)), access=access, kind=kind)
    found = np.asarray(combine(op, old, new))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(F64), function(old.astype(F64), new.astype(F64)))
