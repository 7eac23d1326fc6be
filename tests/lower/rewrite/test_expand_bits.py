"""Functions of bits, on all patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import Source, edges
from tests.lower.triton.legalize.meaning import SM_90, assert_keeps, expanded_for, one, several
from tests.lower.triton.legalize.promises import assert_expanded, ops_of
from tilekern.ir.compute import Select
from tilekern.ir.core import Func, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import DTYPES, DType, kind_of

INTEGERS = [n for n, d in DTYPES.items() if kind_of(d) in ("signed", "unsigned")]
FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]
SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")


def expanded(func: Func) -> Func:
    result = expanded_for(func, SM_90)
    assert_expanded(result, SM_90)
    return result


@st.composite
def patterns(draw: Any, dtype: DType, count: int = 16) -> np.ndarray:
    """Any bits."""
    return np.frombuffer(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), dtype)


@st.composite
def amounts(draw: Any, dtype: DType, count: int = 16) -> np.ndarray:
    """Around 0, around the number of bits, and anything: negative ones are more than there are bits."""
    bits, limits = 8 * dtype.itemsize, np.iinfo(dtype)
    near = st.one_of(st.integers(-2, 2), st.integers(bits - 2, bits + 2), st.integers(limits.min, limits.max))
    fitting = near.map(lambda n: min(max(n, int(limits.min)), int(limits.max)))
    return np.array(draw(st.lists(fitting, min_size=count, max_size=count)), dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("function", SHIFTS)
@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_shifts(function: str, name: str, data: st.DataObject) -> None:
    x, y = data.draw(patterns(DTYPES[name])), data.draw(amounts(DTYPES[name]))
    assert_keeps(expanded, *one(Elementwise, x, y, function=function))


@pytest.mark.parametrize("function", SHIFTS)
@pytest.mark.parametrize("name", INTEGERS)
def test_shifts_by_a_known_amount_are_not_guarded(function: str, name: str) -> None:
    dtype = DTYPES[name]
    bits = 8 * dtype.itemsize

    def body(b: Source, x: Value) -> list[Value]:
        return [b.ew(function, x, b.const(n, x.tile.shape, dtype)) for n in (0, bits - 1)]

    result = assert_keeps(expanded, *several(body, edges(dtype, 64)))
    assert not ops_of(result, Select)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("function", ["population_count", "clz", "sign"])
@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_functions_of_one_integer(function: str, name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    bits = 8 * dtype.itemsize
    powers = np.array([1 << n for n in range(bits)], f"u{dtype.itemsize}").view(dtype)
    x = np.concatenate([data.draw(patterns(dtype)), powers, np.arange(3).astype(dtype), ~powers])
    assert_keeps(expanded, *one(Elementwise, x, function=function))


@pytest.mark.parametrize("name", FLOATS)
@given(data=st.data())
def test_nextafter(name: str, data: st.DataObject) -> None:
    """Zeros, subnormals, the largest numbers, infinities, NaN, in all pairs; and any bits."""
    dtype = DTYPES[name]
    bits = np.dtype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        largest = np.nextafter(np.asarray(np.inf).astype(dtype), np.zeros((), dtype)).view(bits)
    small = np.array([0, 1, 2, largest, largest + 1, largest - 1], bits)
    special = np.concatenate([small, small | bits.type(1 << (8 * dtype.itemsize - 1))]).view(dtype)
    x, y = (m.reshape(-1) for m in np.meshgrid(special, special))
    x, y = (np.concatenate([a, data.draw(patterns(dtype)), a]) for a in (x, y))
    assert_keeps(expanded, *one(Elementwise, x, y, function="nextafter"))
