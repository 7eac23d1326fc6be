import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.softmax import reference, softmax
from tilekern.kernels.softmax.cases import CASES, Case
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})


naive = jax.jit(reference, static_argnames="dtype")


def check(x: Any, **blocks: int) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out, low = softmax(x, **blocks), naive(x, dtype=x.dtype)
    assert_close(out, in_float64(reference, x), low, length=x.shape[-1])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    check(data.draw(arrays(jnp.dtype(dtype), (rows, columns))), **blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", BLOCKS)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, blocks: dict[str, int], data: st.DataObject) -> None:
    check(data.draw(arrays(jnp.dtype(dtype), (3, 19), [np.inf, -np.inf, np.nan, 0.0])), **blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_rows_that_begin_with_infinities(blocks: dict[str, int]) -> None:
    """Whole tiles of -inf count nothing, and a row of nothing else is NaN."""
    x = np.full((3, 40), -np.inf, np.float32)
    x[0, 30:], x[1, :5] = np.arange(10), 1.0
    check(x, **blocks)
    assert np.isnan(softmax(x, **blocks)[2]).all()


@pytest.mark.parametrize("blocks", BLOCKS)
def test_large_numbers_do_not_overflow(blocks: dict[str, int]) -> None:
    check(np.linspace(-3e38, 3e38, 33, dtype=np.float32).reshape(1, 33), **blocks)
    check(np.full((1, 33), 3e38, np.float32), **blocks)


@pytest.mark.parametrize(("shape", "axis"), [((37,), 0), ((2, 3, 5), -1), ((2, 3, 5), 0), ((4, 0, 3), 1), ((0, 3), 1)])
def test_any_axis_of_any_rank(shape: tuple[int, ...], axis: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    oracle, low = in_float64(partial(reference, axis=axis), x), reference(x, axis)
    assert_close(softmax(x, axis, block_rows=2, block_columns=4), oracle, low, length=x.shape[axis])
    assert_close(jax.nn.softmax(x, axis), oracle, low, length=x.shape[axis])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    (x,) = case.arrays(jax.random.key(0), dtype)
    assert x.shape == (case.rows, case.columns)
    check(x, block_rows=16, block_columns=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    (x,) = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(softmax, x) == x


@pytest.mark.one_backend
@settings(max_examples=10)
@given(data=st.data(), shape=st.sampled_from([(5, 19), (4, 16), (1, 3)]), columns=st.sampled_from([8, 32]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int], columns: int) -> None:
    x = data.draw(arrays(np.float32, shape))
    traced = softmax_forward.trace(x, block_rows=4, block_columns=columns)
    oracle, low = in_float64(reference, x), reference(x)
    assert_close(tk.interpret(traced)(x), oracle, low, length=shape[1])


def test_sums_in_bfloat16_would_be_found() -> None:
    """The rule is sharp enough: a float32 result computed in bfloat16 fails it."""
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    with pytest.raises(AssertionError, match="too far from the oracle"):
        assert_close(reference(x, dtype=jnp.bfloat16), in_float64(reference, x), reference(x), length=256)


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (jnp.zeros((2, 3), jnp.int32), "x = int32[2, 3]"),
        (jnp.zeros(()), "x = float32[]"),
        ([1.0], "x = [1.0] (list)"),
        (jnp.zeros(3, jnp.float8_e4m3fn), "x = float8_e4m3fn[3]"),
    ],
)
def test_what_is_no_array_of_floats_with_an_axis(x: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        softmax(x)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.parametrize("axis", [2, -3, True, (0, 1), None])
def test_an_axis_that_the_array_does_not_have(axis: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"axis = {axis!r}")) as caught:
        softmax(jnp.zeros((2, 3)), axis)  # here
    assert "# here" in caught.value.loc.snippet()
