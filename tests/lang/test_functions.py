"""`dot`, `zeros`, `full`, `cdiv`, `accumulator`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import BLOCKS, COMPILED, EXTENTS, WIDE, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import ArgumentError

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(4, 6)
BF16 = ml_dtypes.bfloat16


@pytest.mark.smoke
@COMPILED
@given(EXTENTS, EXTENTS, EXTENTS, BLOCKS, BLOCKS, BLOCKS)
def test_a_blocked_product(m: int, n: int, k: int, block_m: int, block_n: int, block_k: int) -> None:
    x, w = numbers(m, k) % 5, numbers(k, n) % 7
    check(product, x, w, oracle=lambda x, w, **_: x @ w, block_m=block_m, block_n=block_n, block_k=block_k)


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), np.float32))
def product(x, w, out, *, block_m: tk.Block = 4, block_n: tk.Block = 4, block_k: tk.Block = 4):
    i, j = tk.parallel(x.shape[0], block_m), tk.parallel(w.shape[1], block_n)
    axis = tk.serial(x.shape[1], block_k)
    out[i, j] = tk.fold(axis, lambda k, acc: tk.dot(x[i, k], w[k, j], acc), tk.zeros((i, j)))


@pytest.mark.parametrize(
    ("dtype", "wide"), [("f4", "f4"), ("f2", "f4"), (BF16, "f4"), ("i1", "i4"), ("i4", "i4"), ("u1", "i4")]
)
def test_products_accumulate_wide(dtype, wide) -> None:
    @kernel(((4, 4), wide))
    def f(x, out):
        assert tk.accumulator(x.dtype) == wide
        out[...] = tk.dot(x[...], x[...].T)

    x = (X * 5).astype(dtype)
    check(f, x, oracle=(x.astype(wide) @ x.astype(wide).T))


def test_leading_dims_are_batch_dims() -> None:
    @kernel(((2, 3, 3), np.float32))
    def f(x, out):
        out[...] = tk.dot(x[...], x[...].mT)

    x = numbers(2, 3, 5)
    check(f, x, oracle=x @ x.transpose(0, 2, 1))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16", "bf16x3", "bf16x6"])
def test_a_precision_reaches_the_ir(precision) -> None:
    @kernel(((4, 4), np.float32))
    def f(x, out):
        out[...] = tk.dot(x[...], x[...].T, precision=precision)

    assert (f"{precision}" in str(f.trace(X))) == (precision != "ieee")


def test_the_default_precision_of_jax_changes_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    with jax.default_matmul_precision("bfloat16"):
        low = str(product.trace(x, x)), np.asarray(product(x, x, block_m=3))
    assert low[0] == str(product.trace(x, x))
    np.testing.assert_array_equal(low[1], product(x, x, block_m=3))


def test_zeros_and_full_take_tiles_as_sizes() -> None:
    @kernel(((8,), np.float32), ((8, 3), np.int32))
    def f(x, a, b):
        i = tk.parallel(8, 4)
        a[i] = tk.zeros(i)
        b[i] = tk.full((i, 3), i.index, jnp.int32)

    indices = np.repeat(np.int32([[0], [1]]), 4, axis=0).repeat(3, axis=1)
    check(f, X, oracle=(np.zeros(8, np.float32), indices))


@given(st.integers(0, 50), st.integers(1, 9))
def test_cdiv(a: int, b: int) -> None:
    assert tk.cdiv(a, b) == -(-a // b) == int(tk.cdiv(jnp.int32(a), b))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_dot_of_two_dtypes() -> None:
    @like_first
    def f(x, out):
        tk.dot(x[...], x[...].T.astype(jnp.float16))  # <-

    got = "a = float32[4, 6], b = float16[6, 4]"
    with refused(ArgumentError, "the operands of tk.dot do not fit", expected="one dtype", got=got, fix=".astype"):
        f.trace(X)


@pytest.mark.parametrize("shapes", [((4, 6), (4, 6)), ((6,), (6, 4)), ((1, 4, 6), (2, 6, 4)), ((4, 6), (1, 6, 4))])
def test_dot_of_shapes_that_do_not_fit(shapes) -> None:
    @like_first
    def f(x, out):
        tk.dot(tk.zeros(shapes[0]), tk.zeros(shapes[1]))  # <-

    wanted = "a[..., M, K] and b[..., K, N]"
    with refused(ArgumentError, "the operands of tk.dot do not fit", expected=wanted, got="a = float32[", fix="mT"):
        f.trace(X)


def test_dot_with_an_accumulator_that_does_not_fit() -> None:
    @like_first
    def f(x, out):
        tk.dot(x[...], x[...].T, x[...])  # <-

    with refused(
        ArgumentError,
        "the accumulator of tk.dot does not fit the product",
        expected="acc = float32[4, 4]",
        got="acc = float32[4, 6]",
        fix="tk.zeros",
    ):
        f.trace(X)


@pytest.mark.parametrize(("operand", "got"), [(2.5, "b = 2.5 (float)"), ([1], "b = [1] (list)")])
def test_dot_of_what_is_no_tile(operand, got) -> None:
    @like_first
    def f(x, out):
        tk.dot(x[...], operand)  # <-

    with refused(ArgumentError, "tk.dot takes tiles", expected="a tile", got=got, fix="load it from a ref"):
        f.trace(X)


def test_dot_of_an_unknown_precision() -> None:
    @like_first
    def f(x, out):
        tk.dot(x[...], x[...].T, precision="high")  # <-

    with refused(ArgumentError, "tk.dot does not know this precision", expected="'tf32'", got="precision = 'high'"):
        f.trace(X)


@pytest.mark.parametrize("size", [-1, 2.0, "n", None])
def test_full_of_a_size_that_is_none(size) -> None:
    @like_first
    def f(x, out):
        tk.zeros((2, size))  # <-

    with refused(
        ArgumentError, "a size of the tile must be a static integer of at least 0", got="a size of the tile = "
    ):
        f.trace(X)


def test_full_of_more_than_a_scalar() -> None:
    @like_first
    def f(x, out):
        tk.full((4, 6), x[0])  # <-

    with refused(
        ArgumentError, "a tile is filled with one scalar", expected="f32", got="float32[6]", fix="broadcast_to"
    ):
        f.trace(X)


def test_a_dtype_that_is_none_or_an_array() -> None:
    for dtype in (None, X):

        @like_first
        def f(x, out):
            out[...] = tk.zeros((4, 6), dtype)  # <-  # noqa: B023

        with refused(ArgumentError, "tiles have no such dtype", expected="f32", got="dtype = ", fix="jax.numpy"):
            f.trace(X)


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"]


@WIDE
@given(
    st.sampled_from(INTEGERS), st.one_of(st.integers(-(2**33), 2**33), st.integers(-3, 300), st.floats(), st.booleans())
)
def test_full_of_a_number_that_the_dtype_does_not_hold(dtype, value) -> None:
    """A number is stored as it is, or it is refused: it never wraps around, and is not rounded."""

    @kernel(((2,), np.dtype(dtype)))
    def f(x, out):
        out[...] = tk.full(2, value, dtype)

    limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if limits[0] <= value <= limits[1] and value == int(value):
        (result,) = interpreted(f, X)
        assert result.tolist() == [value, value]
    else:
        with pytest.raises(ArgumentError, match="a tile is filled with one scalar"):
            f.trace(X)
