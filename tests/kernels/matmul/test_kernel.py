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
from tests.kernels.programs import arrays_of, calls
from tilekern.errors import ArgumentError
from tilekern.kernels.matmul import fused_matmul, kernel, matmul, reference
from tilekern.kernels.matmul.cases import CASES, Case
from tilekern.kernels.matmul.products import splits
from tilekern.kernels.matmul.split import split_matmul
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
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
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


BATCHES = (
    ((3, 4, 9), (9, 5)),  # rows
    ((2, 3, 4, 9), (1, 1, 9, 5)),
    ((3, 4, 9), (3, 9, 5)),
    ((4, 9), (3, 9, 5)),
    ((2, 1, 4, 9), (3, 9, 5)),  # an outer product of both batches
    ((2, 3, 1, 9), (2, 1, 9, 1)),
    ((0, 4, 9), (0, 9, 5)),
    ((0, 4, 9), (9, 5)),
)


@pytest.mark.parametrize("transposes", [(False, False), (True, False)])
@pytest.mark.parametrize("shapes", BATCHES, ids=str)
def test_leading_dims_broadcast(shapes: tuple[tuple[int, ...], ...], transposes: tuple[bool, bool]) -> None:
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(s).astype(np.float32) for s in shapes)
    left, right = (np.swapaxes(a, -1, -2) if t else a for a, t in zip((x, w), transposes, strict=True))
    out = matmul(left, right, transpose_lhs=transposes[0], transpose_rhs=transposes[1])
    assert out.shape == np.matmul(x, w).shape
    if out.size:
        assert_close(out, in_float64(reference, x, w), jax.jit(reference)(x, w), length=9)


@pytest.mark.one_backend
def test_what_is_broadcast_is_not_copied() -> None:
    x, w = jnp.ones((7, 1, 4, 8)), jnp.ones((3, 8, 5))
    made = list(arrays_of(jax.make_jaxpr(matmul)(x, w).jaxpr))
    assert made and all(a.size in (x.size, w.size, 7 * 3 * 4 * 5) for a in made)


# Sums that a target may split, and the parts: as its schedule says, none, or more than there are of 128 terms.
SPLITS = ((5, 4097, 7, None), (3, 300, 4, 64), (40, 1, 3, 2), (5, 1000, 70, 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_split_sums(split: tuple[int, int, int, int | None], transpose: bool, dtype: str) -> None:
    m, k, n, parts = split
    x, w = Case("split", m, k, n).arrays(jax.random.key(0), dtype)
    left, right = (x.T, w.T) if transpose else (x, w)
    out = matmul(left, right, transpose_lhs=transpose, transpose_rhs=transpose, split_k=parts)
    assert_close(out, in_float64(reference, x, w), jax.jit(reference)(x, w), length=k)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_split_sums_of_integers(dtype: str) -> None:
    random, info = np.random.default_rng(0), np.iinfo(dtype)
    x, w = (random.integers(info.min, info.max, s, dtype, endpoint=True) for s in ((4, 300), (300, 5)))
    np.testing.assert_array_equal(matmul(x, w, split_k=3), reference(x, w))


@pytest.mark.one_backend
def test_derivatives_of_split_sums() -> None:
    """Of both modes, and of second order; the gradients of weights are sums of many rows, which are split again."""
    x, w = Case("rows", 5000, 6, 4).arrays(jax.random.key(0), "float32")

    def of(product: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sin(product(x.T, product(x, w))).sum()

        return lambda w: (jax.grad(loss)(w), jax.jvp(jax.grad(loss), (w,), (w,))[1])

    split = partial(matmul, split_k=3)
    ours = of(lambda a, b: split(a, b) if a.shape[1] > 100 else matmul(a, b))
    for found, exact, low in zip(ours(w), in_float64(of(jnp.matmul), w), of(jnp.matmul)(w), strict=True):
        assert_close(found, exact, low, length=5000, factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("target", "shape", "parts"),
    [
        ("cuda:sm_90", (64, 65536, 64), 64),  # a tile for one multiprocessor of 132
        ("cuda:sm_90", (16, 8192, 256), 8),
        ("cuda:sm_90", (1, 4096, 4096), 1),
        ("cuda:sm_90", (4096, 4096, 4096), 1),
        ("cpu:llvm", (64, 1 << 17, 64), 16),
        ("cpu:llvm", (64, 4096, 64), 1),
        ("cpu:llvm", (128, 1 << 17, 128), 1),
        ("cpu:xla", (64, 1 << 17, 64), 1),
        ("tpu:v5e", (64, 1 << 17, 64), 1),
    ],
)
def test_sums_are_split_where_cores_have_no_tile(target: str, shape: tuple[int, int, int], parts: int) -> None:
    m, k, n = shape
    x, w = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    if not splits(x, w, False, False, None):
        assert parts == 1
        return
    (called,) = split_matmul.trace(x, w, dtype="bfloat16", target=target).kernels
    assert called.ir.name == ("matmul" if parts == 1 else "matmul_parts")
    assert parts == 1 or called.ir.grid[0] == parts


@pytest.mark.one_backend
def test_launch_options_are_those_of_the_kernel() -> None:
    x, w = jnp.ones((4, 5000)), jnp.ones((5000, 4))
    named = jax.make_jaxpr(partial(matmul, num_warps=4))(x, w)
    assert calls(named.jaxpr, "matmul") == 1 and calls(jax.make_jaxpr(matmul)(x, w).jaxpr, "split_matmul") == 1


@pytest.mark.one_backend
@pytest.mark.parametrize("split_k", [0, -1, 2.0, True])
@pytest.mark.parametrize("function", [matmul, partial(fused_matmul, epilogue=jnp.sin)], ids=["matmul", "fused_matmul"])
def test_no_number_of_parts(function: Any, split_k: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"split_k = {split_k!r}")) as caught:
        function(jnp.ones((2, 3)), jnp.ones((3, 2)), split_k=split_k)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@settings(max_examples=10)
@given(data=st.data(), shape=st.sampled_from([(5, 9, 7), (8, 16, 8), (1, 0, 3), (0, 4, 2)]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w = (data.draw(arrays(np.float32, s)) for s in ((m, k), (k, n)))
    traced = kernel.matmul.trace(x, w, block_m=4, block_n=4, block_k=8)
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
        ((2, 3), (4, 3), "lhs = float32[2, 3], rhs = float32[4, 3]"),
        ((3,), (3, 3), "lhs = float32[3], rhs = float32[3, 3]"),
        ((2, 3), (1, 4, 2), "lhs = float32[2, 3], rhs = float32[1, 4, 2]"),
        ((3, 2, 3), (2, 3, 2), "lhs = float32[3, 2, 3], rhs = float32[2, 3, 2]"),
        ((2, 3, 4, 5), (3, 2, 5, 4), "lhs = float32[2, 3, 4, 5], rhs = float32[3, 2, 5, 4]"),
    ],
)
def test_matrices_that_do_not_fit(x: tuple[int, ...], w: tuple[int, ...], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        matmul(jnp.zeros(x), jnp.zeros(w))  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_matrices_of_different_dtypes() -> None:
    with pytest.raises(ArgumentError, match=re.escape("lhs = float32[2, 2], rhs = bfloat16[2, 2]")):
        matmul(jnp.zeros((2, 2)), jnp.zeros((2, 2), jnp.bfloat16))
