"""The step against its definition in float64; stochastic rounding goes to a neighbour, and is right on average."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.kernels.adamw_step import adamw_step, reference
from tilekern.kernels.adamw_step.cases import CASES, Case
from tilekern.testing import arrays, assert_close, in_float64, lengths

NUMBERS = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
FACTORS = np.array([0.5, 0.25, 1 / (1 - 0.9), 1 / (1 - 0.99)], np.float32)
BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})

step, naive = (partial(f, **NUMBERS) for f in (adamw_step, reference))


def check(given: list[Any], **blocks: int) -> None:
    """Weight, gradient and moments, rounded to nearest."""
    wide = given[0].dtype == np.float64
    with jax.enable_x64(wide):
        factors = FACTORS.astype(np.float64 if wide else np.float32)
        found = step(*given, factors, None, (), **blocks)
        low = naive(*given, factors)
    assert [x.dtype for x in found] == [x.dtype for x in low]
    for out, exact, rounded in zip(found, in_float64(naive, *given, factors), low, strict=True):
        assert_close(out, exact, rounded)


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float64", "float64"),
    ],
)
@settings(max_examples=5)
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, moments: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    param, gradient, first, second = (
        data.draw(arrays(jnp.dtype(t), (rows, columns))) for t in (dtype, dtype, moments, moments)
    )
    check([param, gradient, first, abs(second)], **blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    """With the rounding that the case asks for: by at most one place, as twice the naive error."""
    made = case.arrays(jax.random.key(0), dtype)
    found = adamw_step(*made, **case.keywords, block_rows=16, block_columns=32)
    low = reference(*made, **case.keywords)
    exact = in_float64(partial(reference, **case.keywords), *made[:5])
    for out, wide, rounded in zip(found, exact, low, strict=True):
        assert_close(out, wide, rounded)


def stochastic(given: list[Any], key: Any, **blocks: int) -> Any:
    coordinates = tuple(jnp.arange(n, dtype=jnp.uint32) for n in given[0].shape)
    keys = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(jnp.asarray(key)), (3, 2)))
    return step(*given, FACTORS, keys, coordinates, **blocks)


def drawn(shape: tuple[int, int], dtype: Any = jnp.bfloat16) -> list[Any]:
    random = np.random.default_rng(0)
    param, gradient, first, second = (random.standard_normal(shape).astype(dtype) for _ in range(4))
    return [param, gradient, first, abs(second)]


def test_every_result_is_one_of_two_neighbours_and_each_array_has_its_own_bits() -> None:
    given = drawn((40, 70))
    found, exact = stochastic(given, np.uint32([1, 2])), naive(*given, FACTORS, dtype=jnp.float32)
    ups = []
    for out, wide in zip(found, exact, strict=True):
        assert out.dtype == jnp.bfloat16
        wide = np.asarray(wide)
        down = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)  # towards zero
        up = ((wide.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
        out = np.asarray(out.astype(jnp.float32))
        # The last bits of float32 may differ, which matters only beside a bfloat16.
        close = np.minimum(abs(out - down), abs(out - up)) <= abs(up - down) * 2**-8
        assert close.all()
        ups.append(out == up)
    assert all(0.4 < up.mean() < 0.6 for up in ups)
    assert all(0.4 < (a != b).mean() < 0.6 for a, b in pairwise(ups))


@settings(max_examples=6)
@given(blocks=st.sampled_from(BLOCKS), key=st.integers(0, 2**32 - 1))
def test_bits_depend_on_elements_and_not_on_blocks(blocks: dict[str, int], key: int) -> None:
    given, key_data = drawn((13, 21)), np.uint32([key, 7])
    whole = stochastic(given, key_data, block_rows=16, block_columns=32)
    for one, other in zip(stochastic(given, key_data, **blocks), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    others = stochastic(given, np.uint32([key, 8]))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(others, whole, strict=True))


def test_the_mean_of_many_roundings_is_the_exact_step() -> None:
    """Of 20,000 equal weights: the mean differs from the exact value by a few of its standard deviations at most."""
    given = [np.full((200, 100), x, jnp.bfloat16) for x in (1.0, 0.03, 0.02, 0.5)]
    found, exact = stochastic(given, np.uint32([5, 6])), naive(*given, FACTORS, dtype=jnp.float32)
    for out, wide in zip(found, exact, strict=True):
        out, wide = np.asarray(out, np.float64), np.asarray(wide, np.float64)
        assert len(np.unique(out)) == 2
        assert abs(out.mean() - wide.mean()) < 5 * out.std() / np.sqrt(out.size)


def test_rounding_of_one_element_tells_nothing_of_others() -> None:
    """Halves of a place, rounded in a matrix: products of neighbours, squares and means are as of fair coins."""
    side = 256
    given = [np.full((side, side), x, np.float32) for x in (1.0, 0.0, 0.0, 0.0)]
    given[0] = given[0].astype(jnp.bfloat16)
    coordinates = tuple(jnp.arange(side, dtype=jnp.uint32) for _ in range(2))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), (3, 2)))
    halfway = {**NUMBERS, "weight_decay": 2.0**-9}  # bfloat16 has 1 - 2^-8 below 1
    out, *_ = adamw_step(*given, np.ones(4, np.float32), keys, coordinates, **halfway)
    coins = 2 * (np.asarray(out, np.float64) == 1) - 1
    products = [coins[:, :-k] * coins[:, k:] for k in (1, 2, 8, 128)] + [coins[:-k] * coins[k:] for k in (1, 2, 8, 128)]
    for found in [coins, *products, products[0][1:] * products[0][:-1]]:
        assert abs(found.mean()) < 4 / np.sqrt(found.size)
    for along in (0, 1):  # the mean of squares of 256 standard normal numbers
        assert abs((coins.mean(along) ** 2 * side).mean() - 1) < 4 * np.sqrt(2 / side)


def test_nan_stays_in_its_element() -> None:
    given = drawn((5, 9))
    given[1][2, 3], given[0][4, 0] = np.nan, np.inf
    for blocks in BLOCKS:
        for out, exact in zip(stochastic(given, np.uint32([0, 0]), **blocks), naive(*given, FACTORS), strict=True):
            np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
            np.testing.assert_array_equal(np.isinf(out), np.isinf(exact))


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_interpreter_agrees(dtype: str) -> None:
    made = CASES[-1].arrays(jax.random.key(1), dtype)
    traced = adamw_step.trace(*made, **NUMBERS, block_rows=4, block_columns=128)
    for out, ours in zip(tk.interpret(traced)(*made), adamw_step(*made, **NUMBERS), strict=True):
        assert_close(ours, np.asarray(out, np.float64), out)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    made = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    found = jax.eval_shape(partial(adamw_step, **case.keywords), *made)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (made[0], *made[2:4])]
