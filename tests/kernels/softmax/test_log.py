"""The logarithm of softmax: values, derivatives, numbers that are not finite, and errors."""

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
from tilekern.kernels.softmax import log_reference, log_softmax
from tilekern.kernels.softmax.log import log_softmax_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})

naive = jax.jit(log_reference, static_argnames="dtype")


def check(x: Any, **blocks: int) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out, low = log_softmax(x, **blocks), naive(x, dtype=x.dtype)
    assert_close(out, in_float64(log_reference, x), low, length=x.shape[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    check(data.draw(arrays(jnp.dtype(dtype), (rows, columns))), **blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(blocks: dict[str, int], data: st.DataObject) -> None:
    check(data.draw(arrays(np.float32, (3, 19), [np.inf, -np.inf, np.nan, 0.0])), **blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_weights_that_are_0_have_a_logarithm(blocks: dict[str, int]) -> None:
    x = np.float32([[0, -200, -3e4, -np.inf], [3e38, 0, -3e38, 1], [1e7, 1e7, 1e7 - 1, 0]])
    check(x, **blocks)
    assert log_softmax(x, **blocks)[0, 1] == -200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", BLOCKS[:2])
def test_derivatives(dtype: str, blocks: dict[str, int]) -> None:
    x, t, c = (np.random.default_rng(n).standard_normal((3, 19)).astype(dtype) for n in range(3))

    def derivatives(function: Any, x: Any, t: Any, c: Any) -> Any:
        loss = lambda x: (function(x) * c).sum()  # noqa: E731
        hessian = jax.jvp(jax.grad(loss), (x,), (t,))[1]
        return jax.jvp(function, (x,), (t,))[1], jax.grad(loss)(x), hessian

    found = jax.jit(partial(derivatives, partial(log_softmax, **blocks)))(x, t, c)
    low = jax.jit(partial(derivatives, partial(log_reference, dtype=dtype)))(x, t, c)
    for out, exact, naive in zip(found, in_float64(partial(derivatives, log_reference), x, t, c), low, strict=True):
        assert_close(out, exact, naive, length=19, factor=3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    oracle = in_float64(partial(log_reference, axis=axis), x)
    assert_close(log_softmax(x, axis), oracle, jax.nn.log_softmax(x, axis), length=x.shape[axis])
    assert log_softmax(jnp.zeros((2, 0, 3)), axis).shape == (2, 0, 3)


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    x = np.random.default_rng(0).standard_normal((5, 19)).astype(np.float32)
    for columns in (8, 32):
        traced = log_softmax_forward.trace(x, block_rows=4, block_columns=columns)
        assert_close(tk.interpret(traced)(x), in_float64(log_reference, x), log_reference(x), length=19)


def test_what_is_refused() -> None:
    for x, got in ((jnp.zeros((2, 3), jnp.int32), "x = int32[2, 3]"), (jnp.zeros(()), "x = float32[]")):
        with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
            log_softmax(x)  # here
        assert "# here" in caught.value.loc.snippet()
    with pytest.raises(ArgumentError, match="axis of log_softmax"):
        log_softmax(jnp.zeros((2, 3)), 2)
