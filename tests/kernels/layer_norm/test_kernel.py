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
from tilekern.kernels.layer_norm import layer_norm, reference
from tilekern.kernels.layer_norm.cases import CASES, Case
from tilekern.kernels.layer_norm.kernel import layer_norm_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})


naive = jax.jit(reference, static_argnames="dtype")


# By the parameters that are given.
ORACLES = {
    (): reference,
    ("weight",): reference,
    ("bias",): lambda x, bias, eps: reference(x, None, bias, eps=eps),
    ("weight", "bias"): reference,
}


def check(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5, **blocks: int) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out = layer_norm(x, weight, bias, eps=eps, **blocks)
        low = naive(x, weight, bias, eps=eps, dtype=x.dtype)
    given = {name: v for name, v in (("weight", weight), ("bias", bias)) if v is not None}
    oracle = in_float64(ORACLES[tuple(given)], x, *given.values(), eps=eps)
    assert_close(out, oracle, low, length=x.shape[-1])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    x = data.draw(arrays(jnp.dtype(dtype), (rows, columns)))
    weight, bias = (data.draw(st.none() | arrays(jnp.dtype(d), (columns,))) for d in (dtype, "float32"))
    check(x, weight, bias, eps=data.draw(st.sampled_from([1e-5, 0.5])), **blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", BLOCKS)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, blocks: dict[str, int], data: st.DataObject) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    x, weight, bias = (data.draw(arrays(jnp.dtype(dtype), shape, specials)) for shape in ((3, 19), (19,), (19,)))
    check(x, weight, bias, **blocks)


@pytest.mark.parametrize("blocks", BLOCKS[:3])  # a tile of one element rounds the running mean once an element
@given(data=st.data(), mean=st.sampled_from([100.0, -1e4]))
@settings(max_examples=5)
def test_a_mean_that_is_large_against_the_deviation(data: st.DataObject, mean: float, blocks: dict[str, int]) -> None:
    """Of many rows: the naive mean of a few of them may be exact by luck."""
    check(data.draw(arrays(np.float32, (64, 61))) + np.float32(mean), None, None, **blocks)


@pytest.mark.parametrize("shape", [(37,), (2, 3, 5), (2, 0, 5), (3, 0), (0,)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weight, bias = (random.standard_normal(s).astype(np.float32) for s in (shape, shape[-1:], shape[-1:]))
    check(x, weight, bias, block_rows=2, block_columns=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, weight, bias = case.arrays(jax.random.key(0), dtype)
    assert (x.shape, weight.shape, bias.shape) == ((case.rows, case.columns), (case.columns,), (case.columns,))
    check(x, weight, bias, **case.keywords, block_rows=16, block_columns=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    x, weight, bias = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(partial(layer_norm, **case.keywords), x, weight, bias) == x


@pytest.mark.one_backend
@settings(max_examples=10)
@given(data=st.data(), shape=st.sampled_from([(5, 19), (4, 16), (1, 3)]), columns=st.sampled_from([8, 32]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int], columns: int) -> None:
    inputs = tuple(data.draw(arrays(np.float32, s)) for s in (shape, shape[1:], shape[1:]))
    traced = layer_norm_forward.trace(*inputs, eps=1e-5, block_rows=4, block_columns=columns)
    oracle, low = in_float64(reference, *inputs), reference(*inputs)
    assert_close(tk.interpret(traced)(*inputs), oracle, low, length=shape[1])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "weight", "bias", "got"),
    [
        (jnp.zeros((2, 3), jnp.int32), None, None, "x = int32[2, 3], weight = None"),
        (jnp.zeros((2, 3)), jnp.zeros(2), None, "x = float32[2, 3], weight = float32[2]"),
        (jnp.zeros((2, 3)), None, jnp.zeros((1, 3)), "bias = float32[1, 3]"),
        (jnp.zeros((2, 3)), jnp.zeros(3, jnp.int8), None, "weight = int8[3]"),
        (jnp.zeros(()), None, None, "x = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, weight: Any, bias: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        layer_norm(x, weight, bias)  # here
    assert "# here" in caught.value.loc.snippet()
