"""Integers against float64: the errors that the docstrings state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.kernels.sample.fixed_point import LOWEST, UNIT, from_ordered, gumbel, high, log2, ordered, power

pytestmark = pytest.mark.one_backend

random = np.random.default_rng(0)
EDGES = np.concatenate([2.0 ** np.arange(32), 2.0 ** np.arange(1, 33) - 1])
NUMBERS = np.concatenate([EDGES, random.integers(1, 2**32, 20000), random.integers(1, 2**16, 2000)]).astype(np.uint32)


def test_upper_halves_of_products() -> None:
    a, b = NUMBERS, np.random.default_rng(1).permutation(NUMBERS)
    exact = (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)
    difference = exact.astype(np.int64) - np.asarray(high(a, b)).astype(np.int64)
    assert difference.min() >= 0 and difference.max() <= 2


def test_logarithms() -> None:
    found = np.asarray(log2(NUMBERS)) / 2.0**UNIT
    assert abs(found - np.log2(NUMBERS.astype(np.float64))).max() <= 2.0**-19
    np.testing.assert_array_equal(log2(2 ** np.arange(32, dtype=np.uint32)), np.arange(32) << UNIT)


def test_gumbel_numbers() -> None:
    bits = np.concatenate([NUMBERS, 2**32 - 1 - NUMBERS, [0]]).astype(np.uint32)
    exact = -np.log2(-np.log1p((bits | 1) * -(2.0**-32)))
    found = np.asarray(gumbel(bits)) / 2.0**UNIT
    assert abs(found - exact).max() <= 2.0**-18
    assert found.min() >= -4.5 and found.max() == 32


def test_powers() -> None:
    exponents = np.concatenate([-(np.arange(33) << UNIT), random.integers(-30 << UNIT, 1, 20000), [-(2**30), -(2**31)]])
    exact = 2.0 ** (29 + exponents / 2.0**UNIT)
    found = np.asarray(power(exponents.astype(np.int32))).astype(np.float64)
    assert found[0] == 2**29 and abs(found - exact).max() <= 8
    assert (found[exponents <= -31 << UNIT] == 0).all()


def test_keys_have_the_order_of_floats() -> None:
    floats = np.float32([-np.inf, -3e38, -1, -1e-30, -0.0, 0, 1e-30, 1, 1 + 2**-23, 3e38, np.inf])
    keys = np.asarray(ordered(floats)).astype(np.int64)
    np.testing.assert_array_equal(np.sign(np.diff(keys)), [1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(from_ordered(ordered(floats)), floats)
    assert keys[0] == LOWEST == ordered(jnp.float32(jnp.nan))
    assert jax.eval_shape(ordered, floats).dtype == jnp.int32
