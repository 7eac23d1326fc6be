import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.matmul import matmul, reference
from tilekern.kernels.matmul.cases import CASES, Case
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = (
    {},
    {"block_m": 16, "block_n": 16, "block_k": 16},
    {"block_m": 5, "block_n": 24, "block_k": 7},
    {"block_m": 64, "block_n": 1, "block_k": 3},
)


def check(x, w, **keywords) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out, low = matmul(x, w, **keywords), jax.jit(reference)(x, w)
    assert_close(out, in_float64(reference, x, w), low, length=x.shape[1])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 5)  # each compiles three programs
@given(data=st.data(), m=lengths(16), n=lengths(16), k=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, m: int, n: int, k: int, blocks: dict[str, int]) -> None:
    check(data.draw(arrays(jnp.dtype(dtype), (m, k))), data.draw(arrays(jnp.dtype(dtype), (k, n))), **blocks)


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, data: st.DataObject) -> None:
    x, w = (data.draw(arrays(jnp.dtype(dtype), shape, [np.inf, -np.inf, np.nan, 0.0])) for shape in ((5, 19), (19, 7)))
    check(x, w, block_m=4, block_n=4, block_k=8)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("shape", [(5, 37, 7), (16, 32, 16), (3, 0, 2)])
@given(seed=st.integers(0, 1000))
@settings(max_examples=5)
def test_integers_are_exact_modulo_their_range(dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    m, k, n = shape
    random, info = np.random.default_rng(seed), np.iinfo(dtype)
    x, w = (random.integers(info.min, info.max, s, dtype, endpoint=True) for s in ((m, k), (k, n)))
    out = np.asarray(matmul(x, w, block_m=4, block_n=8, block_k=8))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, (x.astype(np.int64) @ w.astype(np.int64)).astype(dtype))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, reference(x, w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, w = case.arrays(jax.random.key(0), dtype)
    assert (x.shape, w.shape) == ((case.rows, case.inner), (case.inner, case.columns))
    check(x, w, block_m=16, block_n=32, block_k=32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_cases_keep_what_is_awkward(case: Case) -> None:
    for size, small in ((getattr(case, n), getattr(case.small(), n)) for n in ("rows", "inner", "columns")):
        assert small <= min(size, 95) and small % 32 == size % 32
    x, w = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(matmul, x, w).shape == (case.rows, case.columns)


@pytest.mark.one_backend
@settings(max_examples=10)
@given(data=st.data(), shape=st.sampled_from([(5, 9, 7), (8, 16, 8), (1, 0, 3), (0, 4, 2)]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w = (data.draw(arrays(np.float32, s)) for s in ((m, k), (k, n)))
    traced = matmul.trace(x, w, block_m=4, block_n=4, block_k=8)
    oracle, low = in_float64(reference, x, w), reference(x, w)
    assert_close(tk.interpret(traced)(x, w), oracle, low, length=k)
    assert_close(traced.lower("cpu:xla").compile()(x, w), oracle, low, length=k)


def test_an_accumulator_as_narrow_as_the_input_would_be_found() -> None:
    """The rule is sharp enough: accumulating in bfloat16 fails it."""
    x, w = (
        jax.random.normal(key, shape, "bfloat16")
        for key, shape in zip(jax.random.split(jax.random.key(0)), ((16, 256), (256, 16)), strict=True)
    )
    low = jax.jit(reference)(x, w)
    narrow = jnp.zeros((16, 16), jnp.bfloat16)
    for k in range(256):
        narrow = narrow + x[:, k : k + 1] * w[k : k + 1]
    with pytest.raises(AssertionError, match="too far from the oracle"):
        assert_close(narrow, in_float64(reference, x, w), low, length=256)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "w", "got"),
    [
        ((2, 3), (4, 3), "x = float32[2, 3], w = float32[4, 3]"),
        ((3,), (3, 3), "x = float32[3], w = float32[3, 3]"),
        ((2, 3), (1, 3, 2), "x = float32[2, 3], w = float32[1, 3, 2]"),
    ],
)
def test_matrices_that_do_not_fit(x: tuple[int, ...], w: tuple[int, ...], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        matmul(jnp.zeros(x), jnp.zeros(w))  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_matrices_of_different_dtypes() -> None:
    with pytest.raises(ArgumentError, match=re.escape("x = float32[2, 2], w = bfloat16[2, 2]")):
        matmul(jnp.zeros((2, 2)), jnp.zeros((2, 2), jnp.bfloat16))
