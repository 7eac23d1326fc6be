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
from tilekern.kernels.rms_norm import reference, rms_norm
from tilekern.kernels.rms_norm.cases import CASES, Case
from tilekern.kernels.rms_norm.kernel import rms_norm_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})


naive = jax.jit(reference, static_argnames="dtype")


def check(x: Any, weight: Any, *, eps: float = 1e-6, offset: float = 0.0, **blocks: int) -> None:
    keywords = {"eps": eps, "offset": offset}
    with jax.enable_x64(np.float64 in (x.dtype, getattr(weight, "dtype", None))):
        out = rms_norm(x, weight, **keywords, **blocks)
        low = naive(x, weight, **keywords, dtype=x.dtype)
    oracle = in_float64(reference, *(v for v in (x, weight) if v is not None), **keywords)
    assert_close(out, oracle, low, length=x.shape[-1])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    x = data.draw(arrays(jnp.dtype(dtype), (rows, columns)))
    weight = data.draw(st.none() | arrays(jnp.dtype(data.draw(st.sampled_from((dtype, "float32")))), (columns,)))
    eps, offset = data.draw(st.sampled_from([1e-6, 0.5])), data.draw(st.sampled_from([0.0, 1.0]))
    check(x, weight, eps=eps, offset=offset, **blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", BLOCKS)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, blocks: dict[str, int], data: st.DataObject) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    x, weight = (data.draw(arrays(jnp.dtype(dtype), shape, specials)) for shape in ((3, 19), (19,)))
    check(x, weight, **blocks)


def test_a_row_of_zeros_is_zero() -> None:
    assert (rms_norm(jnp.zeros((2, 5)), jnp.ones(5)) == 0).all()
    assert np.isnan(rms_norm(jnp.zeros((2, 5)), jnp.ones(5), eps=0.0)).all()


@pytest.mark.parametrize("shape", [(37,), (2, 3, 5), (2, 0, 5), (3, 0), (0,)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(s).astype(np.float32) for s in (shape, shape[-1:]))
    check(x, weight, block_rows=2, block_columns=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, weight = case.arrays(jax.random.key(0), dtype)
    assert (x.shape, weight.shape) == ((case.rows, case.columns), (case.columns,))
    check(x, weight, **case.keywords, block_rows=16, block_columns=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    x, weight = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(partial(rms_norm, **case.keywords), x, weight) == x


@pytest.mark.one_backend
@settings(max_examples=10)
@given(data=st.data(), shape=st.sampled_from([(5, 19), (4, 16), (1, 3)]), columns=st.sampled_from([8, 32]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int], columns: int) -> None:
    x, weight = data.draw(arrays(np.float32, shape)), data.draw(arrays(np.float32, shape[1:]))
    traced = rms_norm_forward.trace(x, weight, eps=1e-6, offset=0.0, block_rows=4, block_columns=columns)
    oracle, low = in_float64(reference, x, weight), reference(x, weight)
    assert_close(tk.interpret(traced)(x, weight), oracle, low, length=shape[1])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "weight", "got"),
    [
        (jnp.zeros((2, 3), jnp.int32), None, "x = int32[2, 3], weight = None"),
        (jnp.zeros((2, 3)), jnp.zeros(2), "x = float32[2, 3], weight = float32[2]"),
        (jnp.zeros((2, 3)), jnp.zeros((2, 3)), "weight = float32[2, 3]"),
        (jnp.zeros((2, 3)), jnp.zeros(3, jnp.int8), "weight = int8[3]"),
        (jnp.zeros(()), None, "x = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, weight: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        rms_norm(x, weight)  # here
    assert "# here" in caught.value.loc.snippet()
