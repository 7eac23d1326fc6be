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
from tilekern.kernels.rope import reference, rope
from tilekern.kernels.rope.cases import CASES, Case
from tilekern.kernels.rope.kernel import rope_forward
from tilekern.lang.tiles import describe
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_t": 4, "block_n": 2}, {"block_t": 7, "block_n": 3})


naive = jax.jit(reference, static_argnames=("interleaved", "dtype"))


def check(x: Any, positions: Any = None, *, theta: float = 10000.0, interleaved: bool = False, **blocks: int) -> None:
    given = (x,) if positions is None else (x, positions)
    with jax.enable_x64(x.dtype == np.float64):
        out = rope(*given, theta=theta, interleaved=interleaved, **blocks)
        low = naive(*given, theta=theta, interleaved=interleaved, dtype=x.dtype)
    assert_close(out, in_float64(reference, *given, theta=theta, interleaved=interleaved), low)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=6)
@given(data=st.data(), length=lengths(8), heads=st.integers(1, 4), half=st.sampled_from([1, 4, 5, 16]))
def test_floats(dtype: str, interleaved: bool, data: st.DataObject, length: int, heads: int, half: int) -> None:
    x = data.draw(arrays(jnp.dtype(dtype), (2, length, heads, 2 * half)))
    shape = data.draw(st.sampled_from([None, (length,), (2, length)]))
    # In float64 the oracle's angles are no better than ours: both are off by the position times an ulp of a frequency.
    farthest = 8 if dtype == "float64" else 500
    positions = None if shape is None else np.random.default_rng(length).integers(0, farthest, shape, np.int32)
    theta = data.draw(st.sampled_from([10000.0, 5e5]))
    check(x, positions, theta=theta, interleaved=interleaved, **data.draw(st.sampled_from(BLOCKS)))


@pytest.mark.parametrize("interleaved", [False, True])
@given(data=st.data())
def test_nan_and_infinities_stay_in_their_pair(interleaved: bool, data: st.DataObject) -> None:
    x = data.draw(arrays(np.float32, (1, 9, 2, 6), [np.inf, -np.inf, np.nan, 0.0]))
    check(x, interleaved=interleaved, block_t=4, block_n=2)


@pytest.mark.parametrize("shape", [(5, 2, 4), (2, 3, 5, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (0, 3, 2, 4)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_rank(shape: tuple[int, ...], interleaved: bool) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check(x, interleaved=interleaved, block_t=2, block_n=2)
    check(x, np.arange(shape[-3]) + 7, interleaved=interleaved)


def test_heads_without_width() -> None:
    assert rope(jnp.zeros((2, 3, 4, 0))).shape == (2, 3, 4, 0)


@given(data=st.data(), shift=st.integers(-1000, 1000))
@settings(max_examples=10)
def test_products_depend_on_distances_only(data: st.DataObject, shift: int) -> None:
    """The purpose of rope: <rope(q, m), rope(k, n)> is a function of m - n."""
    q, k = (data.draw(arrays(np.float64, (1, 1, 16))) for _ in range(2))

    def product(q: Any, k: Any, m: Any, n: Any) -> jax.Array:
        return jnp.sum(rope(q, m) * rope(k, n), keepdims=True)

    with jax.enable_x64(True):
        moved = product(q, k, np.array([7 + shift]), np.array([3 + shift]))
        here = np.asarray(product(q, k, np.array([7]), np.array([3])))
    narrow = product(*(v.astype(np.float32) for v in (q, k)), np.array([7 + shift]), np.array([3 + shift]))
    assert_close(moved, here, np.asarray(narrow, np.float64))


def test_given_frequencies() -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 6)).astype(np.float32)
    frequencies = np.array([1.0, 0.5, 0.0], np.float32)
    definition = partial(reference, interleaved=True)
    wide = in_float64(lambda x, frequencies: definition(x, frequencies=frequencies), x, frequencies)
    out = rope(x, frequencies=frequencies, interleaved=True)
    assert_close(out, wide, definition(x, frequencies=frequencies))
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])  # the angle is 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, positions = case.arrays(jax.random.key(0), dtype)
    assert x.shape == (case.batch, case.length, case.heads, case.width)
    check(x, positions, **case.keywords, block_t=16, block_n=3)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    x, positions = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(partial(rope, **case.keywords), x, positions) == x


@pytest.mark.one_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [None, np.array([[3, 1, 4, 1, 5]], np.int32)])
def test_the_interpreter_agrees(interleaved: bool, positions: Any) -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 3, 8)).astype(np.float32)
    frequencies = (10000.0 ** (-np.arange(4) / 4)).astype(np.float32)
    traced = rope_forward.trace(x, positions, frequencies, interleaved=interleaved, block_t=2, block_n=2)
    given = (x,) if positions is None else (x, positions)
    oracle = in_float64(reference, *given, interleaved=interleaved)
    assert_close(tk.interpret(traced)(x, positions, frequencies), oracle, reference(*given, interleaved=interleaved))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "keywords", "got"),
    [
        (jnp.zeros((5, 2, 3)), {}, "x = float32[5, 2, 3]"),
        (jnp.zeros((2, 4)), {}, "x = float32[2, 4]"),
        (jnp.zeros((5, 2, 4), jnp.int32), {}, "x = int32[5, 2, 4]"),
        (jnp.zeros((5, 2, 4)), {"positions": jnp.zeros(5)}, "positions = float32[5]"),
        (jnp.zeros((5, 2, 4)), {"positions": jnp.zeros(4, jnp.int32)}, "positions = int32[4]"),
        (jnp.zeros((5, 2, 4)), {"positions": 7}, "positions = 7 (int)"),
        (jnp.zeros((5, 2, 4)), {"frequencies": jnp.zeros(4)}, "frequencies = float32[4]"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, keywords: dict[str, Any], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        rope(x, **keywords)  # here
    assert "# here" in caught.value.loc.snippet()


@settings(max_examples=10)
@given(
    positions=st.lists(st.sampled_from([0, 5, 2**31 - 1, 2**31, 2**32 - 4, 2**32, 2**32 + 5]), min_size=3, max_size=3),
    dtype=st.sampled_from(["uint32", "int64", "uint64"]),
    x64=st.booleans(),
)
def test_wide_positions_do_not_wrap(positions: list[int], dtype: str, x64: bool) -> None:
    """A rotation by 2π positions / 2³² tells 2³² - 4 from -4, and 2³² + 5 from 5, in float32 already."""
    given = np.array([min(p, np.iinfo(dtype).max) for p in positions], dtype)
    x, frequencies = np.array([[[1.0, 0.0]]] * 3, np.float32), np.array([2 * np.pi / 2**32], np.float32)
    with jax.enable_x64(x64):
        out = rope(x, given, frequencies=frequencies)
    with jax.enable_x64(True):
        low = reference(x, given, frequencies=frequencies)
    oracle = in_float64(lambda x, frequencies: reference(x, given, frequencies=frequencies), x, frequencies)
    assert_close(out, oracle, low)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "theta", [None, 0, -1, float("nan"), float("inf"), 1e-300, True, "10000", 10**400, jnp.ones(2)], ids=describe
)
def test_theta_that_is_no_base(theta: Any) -> None:
    with pytest.raises(ArgumentError, match="theta of rope") as caught:
        rope(jnp.zeros((5, 2, 64)), theta=theta)  # here
    assert "# here" in caught.value.loc.snippet()
    assert caught.value.got == f"theta = {describe(theta)}"


@pytest.mark.one_backend
def test_a_traced_theta_is_told_to_be_static() -> None:
    with pytest.raises(ArgumentError, match="frequencies"):
        jax.jit(lambda theta: rope(jnp.zeros((5, 2, 4)), theta=theta))(2.0)
