"""Casts to narrow floats in two steps: numbers beside midpoints of two narrow floats round to the nearer one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.ir.funcs import Source, assert_same, nearest
from tests.lower.triton.legalize.meaning import several
from tilekern.ir.compute import Convert
from tilekern.ir.core import Value
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.types import DTYPES, F32, F64, DType, kind_of
from tilekern.lower.rewrite.rounding import to_float32


def rounded_twice(dtype: DType, b: Source, x: Value) -> list[Value]:
    single = to_float32(Make(b), x)
    assert single.tile.dtype == F32
    return [b.op(Convert, single, dtype=dtype)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("narrow", ["bf16", "f16", "f8e4m3fn", "f8e5m2"])
@pytest.mark.parametrize("source", ["i32", "u32", "i64", "u64", "f64"])
def test_numbers_beside_midpoints_round_to_the_nearer_float(source: str, narrow: str) -> None:
    x = beside_midpoints(source, narrow)
    func, arrays = several(partial(rounded_twice, DTYPES[narrow]), x)
    with np.errstate(all="ignore"):
        (found,) = interpret(func, *arrays)
    assert_same(found[: len(x)], nearest(x.astype(F64), DTYPES[narrow]))


def beside_midpoints(source: str, narrow: str) -> np.ndarray:
    """Midpoints of two neighbours in a narrow dtype, the numbers one step next to them, and all their negatives."""
    every = np.arange(1 << 8 * DTYPES[narrow].itemsize - 1).astype(f"u{DTYPES[narrow].itemsize}").view(DTYPES[narrow])
    numbers = every[np.isfinite(every)].astype(F64)
    middles = ((numbers[1:] + numbers[:-1]) / 2)[:: 1 if len(numbers) < 1000 else 7]
    if kind_of(DTYPES[source]) == "float":
        x = np.concatenate([middles, *(np.nextafter(middles, to) for to in (-np.inf, np.inf))])
        return np.concatenate([x, -x])
    # 64-bit integers have 53 bits of float64 first.
    limit = 2.0 ** min(8 * DTYPES[source].itemsize - 1, 53)
    middles = middles[(middles == np.trunc(middles)) & (middles < limit) & (middles > 1)].astype(np.int64)
    x = np.concatenate([middles + step for step in (-1, 0, 1)])
    return (np.concatenate([x, -x]) if kind_of(DTYPES[source]) == "signed" else x).astype(DTYPES[source])
