import re
import sys
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
    wrong = out.copy().ravel()
    first, second = oracle.argmin(), oracle.argmax()
    wrong[first], wrong[second] = out.max(), out.min()
    with pytest.raises(AssertionError, match="too far: 2 of 35 elements"):
        assert_close(wrong.reshape(SHAPE), oracle, low, length=LENGTH)


@given(seed=st.integers(0, 1000))
def test_a_result_computed_in_a_narrower_dtype_is_found(seed: int) -> None:
    _, oracle, low = sums(np.float32, seed)
    with pytest.raises(AssertionError, match="too far from the oracle"):
        assert_close(low.astype(ml_dtypes.bfloat16).astype(np.float32), oracle, low, length=LENGTH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@given(place=st.integers(0, 34))
def test_specials_must_stand_where_the_oracle_has_them(dtype, special: float, place: int) -> None:
    out, oracle, low = sums(dtype, 0)
    out_special, oracle_special = out.copy(), oracle.copy()
    out_special.flat[place], oracle_special.flat[place] = special, special
    assert_close(out_special, oracle_special, low)
    opposite = np.where(np.isinf(out_special), -out_special, out)  # the other infinity, or no special at all
    for wrong, against in ((out_special, oracle), (out, oracle_special), (opposite, oracle_special)):
        named = re.escape(f"first element: out[{place // 7}, {place % 7}] = {float(wrong.flat[place])!r}")
        with pytest.raises(AssertionError, match=f"NaN and ±inf must be where the oracle has them\n  {named}"):
            assert_close(wrong, against, low)


def test_what_overflows_the_dtype_of_the_result_is_infinite() -> None:
    oracle = np.array([1.0, 1e5])
    out = np.array([1.0, np.inf], np.float16)
    assert_close(out, oracle, out)
    with pytest.raises(AssertionError, match="NaN and ±inf"):
        assert_close(np.array([1.0, 65504.0], np.float16), oracle, out)


@pytest.mark.parametrize("overflowed", [np.nan, np.inf])
def test_a_naive_computation_that_overflows_excuses_nothing(overflowed: float) -> None:
    oracle = np.array([1.0, 2.0])
    low = np.array([1.0, overflowed], np.float32)
    with pytest.raises(AssertionError, match="worst element: out\\[1\\]"):
        assert_close(np.array([1.0, 2.1], np.float32), oracle, low)


def test_the_factor_and_the_length_widen_the_bound() -> None:
    out, oracle, low = sums(np.float32, 0)
    bound = bound_of(out, oracle, low)
    naive = np.abs(low.astype(np.float64) - oracle).max()
    assert np.isclose(bound_of(out, oracle, low, factor=3.0) - bound, naive, rtol=0.01)
    longer = bound_of(out, oracle, low, length=10_000) - bound
    assert np.isclose(longer, 4 * 2.0**-24 * (5000**0.5 - 0.5**0.5) * np.abs(oracle).max(), rtol=0.01)


def test_an_oracle_of_a_float64_result_has_rounded_too() -> None:
    """A row of one number, normalised: its two formulas are 3.93 units apart, and ε of a result alone is 3.83."""
    x, weight = (np.array([float.fromhex(text)]) for text in ("0x1.7212a1499f7ebp-4", "0x1.f1f3d10bde5a1p-9"))
    oracle = x / np.sqrt(x * x + 0.5) * (weight + 1)
    out = x * (1 / np.sqrt(x * x + 0.5)) * (weight + 1)
    assert 3.9 < float(np.abs(out / oracle - 1)[0]) * 2**53 < 4.1
    assert_close(out, oracle, oracle)
    with pytest.raises(AssertionError, match="too far"):
        assert_close(oracle + 8 * 2.0**-53 * oracle, oracle, oracle)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("out", lambda x: x[1:]), "shapes differ: out f32[4, 7], oracle f64[5, 7], low f32[5, 7]"),
        (("low", lambda x: x.T), "shapes differ: out f32[5, 7], oracle f64[5, 7], low f32[7, 5]"),
        (("oracle", lambda x: x.astype(np.float32)), "the oracle must be f64: out f32[5, 7], oracle f32[5, 7]"),
        (("out", lambda x: x.astype(np.float64)), "out must have the float dtype of low: out f64[5, 7]"),
        (("out", lambda x: x.astype(np.int32)), "out must have the float dtype of low: out i32[5, 7]"),
    ],
)
def test_shapes_and_dtypes_are_checked(wrong: tuple[str, Callable[[Any], Any]], message: str) -> None:
    given = dict(zip(("out", "oracle", "low"), sums(np.float32, 0), strict=True))
    name, change = wrong
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_close(**{**given, name: change(given[name])})


def test_the_whole_message() -> None:
    oracle = np.array([[1.0, 2.0], [4.0, 8.0]])
    low = (oracle * 1.125).astype(np.float16)
    out = oracle.astype(np.float16)
    assert_close(out, oracle, low)
    out[1, 0] = 7.0
    with pytest.raises(AssertionError) as caught:
        assert_close(out, oracle, low)
    assert str(caught.value) == (
        "out f16[2, 2] is too far from the oracle\n"
        "  worst element: out[1, 0] = 7.0, oracle 4.0\n"
        "  error: 3.000e+00; of the naive computation: 5.000e-01 there, 1.000e+00 at most\n"
        "  bound: 2.004e+00 = 2 * 1.000e+00 + 3.908e-03 (rounding)\n"
        "  too far: 1 of 4 elements"
    )


def test_empty_arrays_are_close() -> None:
    empty = np.zeros((0, 3))
    assert_close(empty.astype(np.float32), empty, empty.astype(np.float32))


# --- the oracle -----------------------------------------------------------------------------------------------------


def test_the_oracle_is_computed_in_float64() -> None:
    def reference(x: jax.Array, index: jax.Array, *, power: Any, rounded: bool) -> dict[str, jax.Array]:
        assert (x.dtype, index.dtype) == (jnp.float64, jnp.int32)
        return {"y": x[index] ** power if rounded is True else x}

    x = jnp.full(3, 1 + 2**-7, jnp.bfloat16)
    found = in_float64(reference, x, jnp.arange(2, dtype=jnp.int32), power=3, rounded=True)["y"]
    assert isinstance(found, np.ndarray) and found.dtype == np.float64
    assert (found == (1 + 2**-7) ** 3).all() and found.shape == (2,)
    assert jnp.zeros(()).dtype == jnp.float32  # outside, 64-bit types are off again


# --- random input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, np.int8, np.int32])
@given(data=st.data())
def test_random_arrays_have_their_type(dtype, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    array = data.draw(arrays(dtype, shape))
    assert (array.dtype, array.shape) == (dtype, tuple(shape))
    assert np.isfinite(array.astype(np.float64)).all()


@pytest.mark.parametrize("special", [np.inf, 0.0])
def test_random_arrays_have_special_elements_and_others(special: float) -> None:
    array = find(arrays(np.float32, (2, 3), [special, np.nan]), lambda x: bool((x == special).any()))
    assert 1 <= np.count_nonzero(array != special) <= 5
    assert np.ptp(find(arrays(np.int8, (9,)), lambda x: bool(x.max() == 8))) > 0


def test_lengths_are_awkward() -> None:
    seen = set()

    @given(lengths(16))  # which tries them all, as they are fewer than its examples
    def collect(length: int) -> None:
        seen.add(length)

    collect()
    assert {0, 1, 15, 16, 17, 31, 32, 33} < seen
    assert {n for n in seen if n > 1 and all(n % d for d in range(2, n))} - {15, 16, 17, 31, 32, 33}


def test_without_hypothesis_the_rule_works_and_random_input_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)  # what Python takes for a failed import
    assert_close(np.ones(2, np.float32), np.ones(2), np.ones(2, np.float32))
    with pytest.raises(ImportError, match=r"pip install hypothesis"):
        lengths(8)
