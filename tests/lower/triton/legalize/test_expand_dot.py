"""Dots of every dtype, as those of dtypes that are multiplied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.legalize.meaning import SIZES, SM_80, SM_90, assert_keeps, expanded_for, one
from tests.lower.triton.legalize.promises import assert_expanded, ops_of
from tilekern.ir.compute import PRECISIONS, Dot, Precision
from tilekern.ir.core import Func
from tilekern.ir.types import BF16, DTYPES, F16, F32, DType, kind_of
from tilekern.lower.triton.chip import CHIPS, Chip

NUMBERS = [n for n in DTYPES if n != "bool"]


def whole(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Numbers of which float32 adds up many products exactly."""
    low = 0 if kind_of(dtype) == "unsigned" else -4
    return np.random.default_rng(seed).integers(low, 4, shape, endpoint=True).astype(dtype)


def expanded(func: Func) -> Func:
    result = expanded_for(func, SM_90)
    assert_expanded(result, SM_90)
    return result


@pytest.mark.parametrize("name", NUMBERS)
@given(data=st.data())
def test_contractions(name: str, data: st.DataObject) -> None:
    """Of dims in any place, several of them, with batches and without."""
    sizes = {
        label: data.draw(SIZES) for label in data.draw(st.sampled_from(["k", "mk", "mkn", "mkjn", "bmkn", "bkjn"]))
    }
    orders = [data.draw(st.permutations([s for s in sizes if s not in other])) for other in "nm"]
    x, y = (whole(tuple(sizes[s] for s in order), DTYPES[name], seed) for seed, order in enumerate(orders))
    contract, batch = (
        tuple(tuple(order.index(s) for s in group if s in sizes) for order in orders) for group in ("kj", "b")
    )
    assert_keeps(expanded, *one(Dot, x, y, contract=contract, batch=batch))


@pytest.mark.parametrize("name", ["i8", "u8", "i16", "u32", "i64", "u64"])
def test_integers_wrap_around(name: str) -> None:
    limits = np.iinfo(DTYPES[name])
    x = np.full((3, 5), limits.max, DTYPES[name])
    assert_keeps(expanded, *one(Dot, x, x.T.copy(), contract=((1,), (0,))))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_precision_bf16_changes_what_is_multiplied(precision: Precision) -> None:
    x = whole((3, 5), F32, 0) + np.float32(2**-9)
    func, arrays = one(Dot, x, x.T.copy(), contract=((1,), (0,)), precision=precision)
    (dot,) = ops_of(assert_keeps(expanded, func, arrays), Dot)
    assert dot.operands[0].tile.dtype == (BF16 if precision == "bf16" else F32)


@pytest.mark.parametrize(("name", "chip"), [("f8e5m2", SM_80), ("f8e5m2", SM_90), ("f8e4m3fn", SM_90)])
def test_8_bit_floats_become_float16_where_tensor_cores_do_not_add_them_up_in_float32(name: str, chip: Chip) -> None:
    """Each of the 256 of a dtype as it is, also subnormals, infinities and NaN."""
    dtype = DTYPES[name]
    every = np.arange(256, dtype=np.uint8).view(dtype).reshape(256, 1)
    func, arrays = one(Dot, every, np.ones((1, 1), dtype), contract=((1,), (0,)))
    (dot,) = ops_of(assert_keeps(lambda f: expanded_for(f, chip), func, arrays), Dot)
    assert dot.operands[0].tile.dtype == F16
    assert expanded_for(func, CHIPS["cuda:sm_100"]) is func
