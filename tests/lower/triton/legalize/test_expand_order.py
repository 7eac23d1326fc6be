"""Sorts and the greatest elements, by integer keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import edges
from tests.lower.triton.legalize.meaning import SM_90, assert_keeps, expanded_for, one, shapes
from tests.lower.triton.legalize.promises import assert_expanded
from tilekern.ir.core import Func
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.types import DTYPES, DType, kind_of


def expanded(func: Func) -> Func:
    result = expanded_for(func, SM_90)
    assert_expanded(result, SM_90)
    return result


@st.composite
def few(draw: Any, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Elements with many equal ones; zeros of both signs, NaN, infinities, the limits."""
    special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, 2])
    if kind_of(dtype) != "float":
        limits = np.iinfo(dtype) if kind_of(dtype) != "bool" else np.iinfo(np.uint8)
        special = np.array([limits.min, limits.max, limits.max - 1, 0, 1], dtype)
    some = np.concatenate([special.astype(dtype), edges(dtype, 4)[-4:]])
    return np.random.default_rng(draw(st.integers(0, 99))).choice(some, shape)


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_sorts_by_one_key(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    x, places = data.draw(few(shape, DTYPES[name])), np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    dim, pick = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, 1))
    assert_keeps(expanded, *one(Sort, x, places, dim=dim, pick=pick))


@given(data=st.data())
def test_sorts_by_several_keys(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    dtypes = data.draw(st.lists(st.sampled_from(list(DTYPES.values())), min_size=2, max_size=4))
    arrays = [data.draw(few(shape, d)) for d in dtypes]
    keys, pick = data.draw(st.integers(1, len(arrays))), data.draw(st.integers(0, len(arrays) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert_keeps(expanded, *one(Sort, *arrays, dim=dim, num_keys=keys, pick=pick))


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_the_greatest_elements(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    x, dim = data.draw(few(shape, DTYPES[name])), data.draw(st.integers(0, len(shape) - 1))
    assert_keeps(expanded, *one(TopK, x, dim=dim, k=data.draw(st.integers(0, shape[dim]))))
