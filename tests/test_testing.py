import builtins
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from tilekern.testing import arrays, assert_close, in_float64, lengths

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
SHAPE = (5, 7)
LENGTH = 64


def sums(dtype: Any, seed: int) -> tuple[Any, Any, Any]:
    """The sums of 64 numbers as (a good result, oracle, naive computation in `dtype`)."""
    terms = np.random.default_rng(seed).standard_normal((LENGTH, *SHAPE)).astype(dtype)
    oracle = terms.astype(np.float64).sum(axis=0)
    low = np.zeros(SHAPE, dtype)
    for term in terms:
        low = (low + term).astype(dtype)
    return oracle.astype(dtype), oracle, low


def bound_of(out: Any, oracle: Any, low: Any, **keywords: Any) -> float:
    """The bound that the rule derives, as its message says."""
    far = (oracle * 2 + 100).astype(out.dtype)
    with pytest.raises(AssertionError) as caught:
        assert_close(far, oracle, low, **keywords)
    return float(re.search(r"bound: (\S+) =", str(caught.value))[1])


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1000))
def test_good_results_pass(dtype, seed: int) -> None:
    out, oracle, low = sums(dtype, seed)
    assert_close(out, oracle, low, length=LENGTH)
    assert_close(low, oracle, low)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1000), place=st.tuples(st.integers(0, 4), st.integers(0, 6)), sign=st.sampled_from([-1, 1]))
def test_an_error_of_three_bounds_is_found_and_named(dtype, seed: int, place: tuple[int, int], sign: int) -> None:
    out, oracle, low = sums(dtype, seed)
    wrong = out.copy()
    wrong[place] = oracle[place] + sign * 3 * bound_of(out, oracle, low, length=LENGTH)
    with pytest.raises(AssertionError, match=re.escape(f"out[{place[0]}, {place[1]}] = {float(wrong[place])!r}")):
        assert_close(wrong, oracle, low, length=LENGTH)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1000))
def test_swapped_elements_are_found(dtype, seed: int) -> None:
    out, oracle, low = sums(dtype, seed)
    with pytest.raises(AssertionError, match="too far: 2 of 35 elements"):
        assert_close(np.where(swap := extremes(oracle), out[swap][::-1].sum(), out), oracle, low) if False else (
            assert_close(swapped(out, oracle), oracle, low)
        )
