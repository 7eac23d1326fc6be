"""`ragged_contracting_dot`, and `ragged_dot` with transposed matrices: the products of each other's derivatives."""

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
from tests.kernels.programs import calls, equations
from tests.kernels.ragged_dot.test_kernel import BLOCKS, group_sizes
from tilekern.errors import ArgumentError
from tilekern.kernels.ragged_dot import contracting_reference, ragged_contracting_dot, ragged_dot, reference
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.testing import arrays, assert_close, in_float64

naive, naive_rows = jax.jit(contracting_reference), jax.jit(reference)


def inside(sizes: np.ndarray, rows: int) -> np.ndarray:
    """The sizes of groups, cut at the last row."""
    return np.diff(np.minimum(np.cumsum(sizes), rows), prepend=0).astype(np.int32)


def check(lhs: Any, rhs: Any, sizes: Any, **blocks: int) -> None:
    with jax.enable_x64(lhs.dtype == np.float64):
        out, low = ragged_contracting_dot(lhs, rhs, sizes, **blocks), naive(lhs, rhs, sizes)
    assert_close(out, in_float64(contracting_reference, lhs, rhs, sizes), low, length=lhs.shape[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    random = np.random.default_rng(0)
    lhs, rhs = (random.standard_normal((21, n)).astype(jnp.dtype(dtype)) for n in (16, 19))
    check(lhs, rhs, np.array([3, 0, 9, 4], np.int32), block_m=8, block_n=16, block_k=8)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 2, 3), (5, 0, 3), (5, 2, 0)])
def test_nothing(m: int, k: int, n: int) -> None:
    out = ragged_contracting_dot(jnp.ones((m, k)), jnp.ones((m, n)), jnp.array([2, 1]))
    np.testing.assert_array_equal(out, np.zeros((2, k, n)) if m == 0 else np.ones((2, k, n)))


@pytest.mark.parametrize("blocks", BLOCKS)
@settings(max_examples=6)
@given(data=st.data())
def test_any_borders(blocks: dict[str, int], data: st.DataObject) -> None:
    """Groups shorter than a tile, as long, and longer; empty groups; rows that no group has."""
    lhs, rhs = (data.draw(arrays(np.float32, shape)) for shape in ((21, 6), (21, 9)))
    sizes = data.draw(group_sizes(5, 9))
    check(lhs, rhs, sizes, **blocks)
    assert (ragged_contracting_dot(lhs, rhs, sizes, **blocks)[inside(sizes, 21) == 0] == 0).all()


@settings(max_examples=6)
@given(data=st.data(), sizes=group_sizes(3, 9))
def test_nan_and_infinities_stay_in_their_group(data: st.DataObject, sizes: np.ndarray) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    lhs, rhs = (data.draw(arrays(np.float32, shape, specials)) for shape in ((19, 6), (19, 9)))
    check(lhs, rhs, sizes, block_m=8, block_n=4, block_k=4)


@pytest.mark.one_backend
def test_it_is_that_mode_of_jax() -> None:
    lhs, rhs = (np.random.default_rng(0).standard_normal((21, n), np.float32) for n in (6, 9))
    sizes = np.array([3, 0, 8, 10], np.int32)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    theirs = jax.lax.ragged_dot_general(lhs, rhs, sizes, dims, precision="highest")
    ours = ragged_contracting_dot(lhs, rhs, sizes)
    assert_close(ours, in_float64(contracting_reference, lhs, rhs, sizes), theirs, length=21)


@settings(max_examples=5)
@given(data=st.data())
def test_transposed_matrices(data: st.DataObject) -> None:
    lhs, rhs = (data.draw(arrays(np.float32, shape)) for shape in ((21, 6), (5, 9, 6)))
    sizes = data.draw(group_sizes(5, 8))
    turned = rhs.swapaxes(1, 2)
    out = ragged_dot(lhs, rhs, sizes, transpose_rhs=True, **BLOCKS[2])
    assert_close(out, in_float64(reference, lhs, turned, sizes), naive_rows(lhs, turned, sizes), length=6)


@pytest.mark.one_backend
@settings(max_examples=5)
@given(data=st.data(), sizes=group_sizes(3, 9))
def test_the_interpreter_agrees(data: st.DataObject, sizes: np.ndarray) -> None:
    lhs, rhs = (data.draw(arrays(np.float32, shape)) for shape in ((19, 6), (19, 9)))
    ends = np.minimum(np.cumsum(sizes, dtype=np.int32), 19)
    traced = ragged_contracting_forward.trace(lhs, rhs, ends, block_m=8, block_n=4, block_k=4)
    oracle, low = in_float64(contracting_reference, lhs, rhs, sizes), naive(lhs, rhs, sizes)
    assert_close(tk.interpret(traced)(lhs, rhs, ends), oracle, low, length=19)


@pytest.mark.one_backend
def test_no_groups() -> None:
    out = ragged_contracting_dot(jnp.ones((3, 2)), jnp.ones((3, 4)), jnp.zeros(0, jnp.int32))
    assert out.shape == (0, 2, 4)
    found = jax.grad(lambda x: ragged_dot(x, jnp.ones((0, 2, 4)), jnp.zeros(0, jnp.int32)).sum())(jnp.ones((3, 2)))
    assert (found == 0).all()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("call", "lhs", "rhs", "expected"),
    [
        (ragged_contracting_dot, (3, 2), (4, 5), "lhs[M, K] and rhs[M, N]"),
        (ragged_contracting_dot, (3, 2), (4, 3, 5), "lhs[M, K] and rhs[M, N]"),
        (lambda *a: ragged_dot(*a, transpose_rhs=True), (3, 2), (4, 2, 5), "lhs[M, K] and rhs[G, N, K]"),
    ],
)
def test_arrays_that_do_not_fit(call: Any, lhs: tuple[int, ...], rhs: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(expected)) as caught:
        call(jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(4, jnp.int32))
    assert caught.value.loc.file == __file__
    assert f"rhs = float32{list(rhs)}" in str(caught.value)


# --- derivatives ------------------------------------------------------------------------------------------------------


def pulled(function: Any, lhs: Any, rhs: Any, cotangent: Any) -> Any:
    return jax.vjp(function, lhs, rhs)[1](cotangent)


def gradient_by_definition(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
    return pulled(lambda *a: reference(*a, sizes), lhs, rhs, cotangent)


naive_gradient = jax.jit(gradient_by_definition)


@settings(max_examples=6)
@given(sizes=group_sizes(4, 9), seed=st.integers(0, 99))
def test_gradients_at_any_borders(sizes: np.ndarray, seed: int) -> None:
    """Empty groups have gradients of zeros, and so have rows that no group has."""
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal(s, np.float32) for s in ((19, 6), (4, 6, 9), (19, 9))]
    found = pulled(lambda *a: ragged_dot(*a, sizes), *arrays)
    lows, oracles = naive_gradient(*arrays, sizes), in_float64(gradient_by_definition, *arrays, sizes)
    for f, oracle, low in zip(found, oracles, lows, strict=True):
        assert_close(f, oracle, low, length=19, factor=3)
    assert (found[0][int(sizes.sum()) :] == 0).all()
    assert (found[1][inside(sizes, 19) == 0] == 0).all()


FORMS = {
    "rows": (lambda *a: ragged_dot(*a, np.array([4, 0, 9], np.int32)), (15, 6), (3, 6, 8)),
    "rows, transposed": (
        lambda *a: ragged_dot(*a, np.array([4, 0, 9], np.int32), transpose_rhs=True), (15, 6), (3, 8, 6)
    ),
    "contracting": (lambda *a: ragged_contracting_dot(*a, np.array([4, 0, 9], np.int32)), (15, 6), (15, 8)),
}  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.one_backend
@forms
def test_transposes_and_finite_differences(form: str) -> None:
    function, *shapes = FORMS[form]
    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        a, b, da, db = (jnp.asarray(random.standard_normal(s)) for s in (*shapes, *shapes))
        value, moved = jax.jvp(function, (a, b), (da, db))
        cotangent = jnp.asarray(random.standard_normal(value.shape))
        found = pulled(function, a, b, cotangent)
        np.testing.assert_allclose(jnp.vdot(moved, cotangent), jnp.vdot(found[0], da) + jnp.vdot(found[1], db), 1e-12)
        # A bilinear function has no third derivative: central differences are exact but for rounding.
        difference = (function(a + da, b + db) - function(a - da, b - db)) / 2
        np.testing.assert_allclose(moved, difference, rtol=1e-11, atol=1e-11)


@pytest.mark.one_backend
@forms
def test_every_order_runs_kernels_alone(form: str) -> None:
    function, *shapes = FORMS[form]
    a, b = (jnp.ones(s) for s in shapes)

    def first(a: Any, b: Any) -> Any:
        return jax.grad(lambda a, b: (function(a, b) ** 2).sum(), (0, 1))(a, b)

    program = jax.make_jaxpr(jax.grad(lambda *ab: sum((g**2).sum() for g in first(*ab)), (0, 1)))(a, b)
    names = [e.primitive.name for e in equations(program.jaxpr)]
    assert calls(program.jaxpr, "ragged_dot_forward") and calls(program.jaxpr, "ragged_contracting_forward")
    assert not {"dot_general", "ragged_dot_general", "while", "scan", "transpose"} & set(names)


@pytest.mark.one_backend
def test_sizes_are_integers_without_derivatives() -> None:
    found = jax.grad(lambda *a: ragged_dot(*a).sum(), (0, 2), allow_int=True)(
        jnp.ones((3, 2)), jnp.ones((1, 2, 4)), jnp.array([2])
    )
    np.testing.assert_array_equal(found[0], [[4, 4], [4, 4], [0, 0]])
    assert found[1].dtype == jax.dtypes.float0


def test_gradients_under_vmap() -> None:
    """All arrays differ, the sizes of groups, too."""
    random = np.random.default_rng(2)
    lhs, rhs, cotangent = (
        jnp.asarray(random.standard_normal(s, np.float32)) for s in ((3, 11, 5), (3, 4, 5, 6), (3, 11, 6))
    )
    sizes = jnp.array([[3, 0, 8, 0], [0, 0, 2, 1], [5, 5, 5, 5]])

    def gradient(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
        return pulled(lambda *a: ragged_dot(*a, sizes), lhs, rhs, cotangent)

    arrays, wanted = (lhs, rhs, cotangent, sizes), jax.vmap(gradient_by_definition)
    found, low, oracle = jax.vmap(gradient)(*arrays), jax.jit(wanted)(*arrays), in_float64(wanted, *arrays)
    for f, o, n in zip(found, oracle, low, strict=True):
        assert_close(f, o, n, length=11, factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_scans_and_checkpoints_agree_with_a_loop(policy: str) -> None:
    """Two layers of experts, each computed again for its gradient, as far as the policy says."""
    random = np.random.default_rng(3)
    x, weights = (jnp.asarray(random.standard_normal(s, np.float32)) for s in ((11, 5), (2, 3, 5, 5)))
    sizes = jnp.array([[3, 0, 8], [0, 4, 2]])

    def layer(x: Any, parts: Any) -> Any:
        return jnp.sin(ragged_dot(x, *parts)) + x, None

    kept = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))

    def scanned(x: Any, weights: Any) -> jax.Array:
        return jnp.sum(jax.lax.scan(kept, x, (weights, sizes))[0] ** 2)

    def by_definition(x: Any, weights: Any) -> jax.Array:
        for w, s in zip(weights, sizes, strict=True):
            x = jnp.sin(reference(x, w, s)) + x
        return jnp.sum(x**2)

    wanted = jax.grad(by_definition, (0, 1))
    found, low, oracle = (
        jax.jit(jax.grad(scanned, (0, 1)))(x, weights),
        jax.jit(wanted)(x, weights),
        in_float64(wanted, x, weights),
    )
    for f, o, n in zip(found, oracle, low, strict=True):
        assert_close(f, o, n, length=20, factor=3)


def test_sums_are_in_float32() -> None:
    """Sums of ones, which bfloat16 cannot count beyond 256."""
    ones = jnp.ones((1000, 3), "bfloat16")
    out = ragged_contracting_dot(ones, ones, np.array([512, 400]))
    np.testing.assert_array_equal(np.asarray(out, np.float32)[:, 0, 0], [512, 400])


def test_gradients_are_the_same_bits_each_time() -> None:
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(s, np.float32) for s in ((300, 30), (3, 30, 40), (300, 40))]
    gradient = jax.jit(partial(pulled, lambda *a: ragged_dot(*a, np.array([100, 7, 150]))))
    first, again = gradient(*arrays), gradient(*arrays)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes"),
    [
        (jnp.ones((6, 2), int), jnp.ones((6, 3)), jnp.array([6])),
        (jnp.ones((6, 2)), jnp.ones((6, 3), int), jnp.array([6])),
        (jnp.ones((6, 2), int), jnp.ones((6, 3), int), jnp.array([6])),
        (jnp.ones((6, 2), "bfloat16"), jnp.ones((6, 3)), jnp.array([6])),
        (jnp.ones((6, 2)), jnp.ones((6, 3)), jnp.array([6.0])),
        (jnp.ones((1, 6, 2)), jnp.ones((6, 3)), jnp.array([6])),
        (jnp.ones((6, 2)), jnp.ones((6, 3)), jnp.array([[6]])),
        (jnp.ones((6, 2)), jnp.ones((5, 3)), jnp.array([6])),
    ],
)
def test_wrong_arrays(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> None:
    with pytest.raises(ArgumentError, match="the arrays of ragged_contracting_dot do not fit") as error:
        ragged_contracting_dot(lhs, rhs, sizes)  # here
    assert error.value.loc is not None and "# here" in error.value.loc.snippet()
