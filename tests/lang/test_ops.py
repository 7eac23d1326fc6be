"""Operations of JAX on tiles: each is traced, compiled and interpreted, and compared with JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lang.checks import COMPILED, interpreted, kernel, refused
from tilekern.errors import UnsupportedError
from tilekern.ir.core import Op
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.testing import assert_close, in_float64

X = np.random.default_rng(0).permutation(32).reshape(4, 8).astype(np.float32) - 9  # different whole numbers
AT, IDX = np.int32(2), np.array([1, -1, 9], np.int32)
BITS = np.random.default_rng(1).integers(-(2**31), 2**31, (4, 8)).astype(np.int32)
ROWS = np.array([[3, 0], [1, 1], [7, 2], [0, -1]], np.int32)


def as_kernel(function: Callable[..., Any], *arrays: Any) -> tk.Kernel:
    """Make a kernel of one program whose outputs are the results of `function` for its whole inputs."""
    types = tuple(jax.tree.leaves(jax.eval_shape(function, *arrays)))

    @tk.kernel(out_type=lambda _: (types,))
    def whole(inputs, outputs):
        results = jax.tree.leaves(function(*(x[...] for x in inputs)))
        for output, result in zip(outputs, results, strict=True):
            output[...] = result

    return whole


def agrees(function: Callable[..., Any], *arrays: Any, exact: bool = True) -> list[Op]:
    """Compare the compiled, the interpreted and JAX's results; returns the kernel's ops, which survive a round trip."""
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arrays))]
    made = as_kernel(function, *arrays)
    found = [np.asarray(x) for x in jax.tree.leaves(jax.jit(made)(arrays))]
    oracle = [] if exact else jax.tree.leaves(in_float64(function, *arrays))
    for results in (found, interpreted(made, arrays)):
        assert len(results) == len(expected) > 0
        for n, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            if exact or got.dtype.kind in "iub":
                assert_same(got, wanted, zeros=False)
            else:
                assert_close(got, oracle[n], wanted, length=32)
    func = made.trace(arrays).ir
    assert to_text(parse(to_text(func))) == to_text(func)
    return list(func.walk())


# Operations whose results, for the values of X and the indices, are exact in any order.
EXACT: dict[str, tuple[Any, ...]] = {
    "argmax and argmin": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(x), jnp.argmin(x // 7, 1)), X),
    "argmax keepdims": (lambda x: jnp.argmax(x, 1, keepdims=True), X),
    "nanargmax": (lambda x: jnp.nanargmax(jnp.where(x > 9, jnp.nan, x), 1), X),
    "cumsum": (lambda x: (jnp.cumsum(x, 1), jnp.cumsum(x, 0), jnp.cumsum(x), lax.cumsum(x, 1, reverse=True)), X),
    "cumprod": (lambda x: (jnp.cumprod(jnp.sign(x), 0), lax.cumprod(jnp.sign(x), 1, reverse=True)), X),
    "cummax and cummin": (lambda x: (lax.cummax(x, 1), lax.cummin(x, 0), lax.cummax(x, 0, reverse=True)), X),
    "cumulative_sum": (lambda x: jnp.cumulative_sum(x, axis=1, include_initial=True), X),
    "sort": (lambda x: (jnp.sort(x, 1), jnp.sort(x, 0), jnp.sort(x, descending=True), jnp.sort(x, axis=None)), X),
    "argsort": (lambda x: (jnp.argsort(x, 1), jnp.argsort(x // 5, 0), jnp.argsort(x // 5, descending=True)), X),
    "lax.sort of several": (lambda x: lax.sort((x // 5, -x, x), dimension=1, num_keys=2), X),
    "lexsort": (lambda x: jnp.lexsort((x, x // 5), axis=1), X),
    "median": (lambda x: jnp.median(x, axis=1), X),
    "top_k": (lambda x: (lax.top_k(x, 3), lax.top_k(x // 5, 8), lax.top_k(x.astype(int) // 5, 1), lax.top_k(x, 0)), X),
    "nothing sorted": (lambda x: (jnp.sort(x[:, :0]), jnp.argsort(x[:, :0]), lax.top_k(x[:, :0], 0)), X),
    "x[i]": (lambda x, i: (x[i], x[i - 3], x[:, i], x[i, i + 1], x[1:, i]), X, AT),
    "x[i] out of bounds": (lambda x, i: (x[i + 2], x[i - 9], x[:, i * 9]), X, AT),
    "x[idx]": (lambda x, i: (x[i % 4], x[:, i % 8], x[1, i % 8], x[i.reshape(3, 1) % 4 + jnp.arange(2)]), X, IDX),
    "x[idx, idx]": (lambda x, i: (x[jnp.arange(3), i % 8], x[i % 4, :2], x.T[i % 8, i % 4]), X, IDX),
    "x[idx, :, idx]": (lambda x, i: x.reshape(4, 2, 4)[i % 4, :, i % 3], X, IDX),
    "get": (
        lambda x, i: (*(x.at[i].get(mode=m, fill_value=7) for m in ("fill", "clip")), x.at[i].get()),
        *(X, IDX % 5),
    ),
    "take": (lambda x, i: tuple(jnp.take(x, i, axis=a, mode=m) for a in (0, 1) for m in ("clip", "wrap")), X, IDX),
    "take fills": (lambda x, i: (jnp.take(x, i, axis=1), jnp.take(x, i), jnp.take(x.astype(int), i, axis=0)), X, IDX),
    "take of two dims": (lambda x, i: jnp.take(x, i.reshape(3, 1) + jnp.arange(2), axis=1, mode="clip"), X, IDX),
    "take_along_axis": (lambda x, r: (jnp.take_along_axis(x, r, 1), jnp.take_along_axis(x, r.T[:, :1], 0)), X, ROWS),
    "take_along_axis fills": (lambda x, r: jnp.take_along_axis(x, r * 5, 1), X, ROWS),
    "take_along_axis repeats": (lambda x, r: jnp.take_along_axis(x, r[:1], 1, mode="clip"), X, ROWS),
    "take_along_axis of three dims": (
        lambda x, r: jnp.take_along_axis(x.reshape(4, 2, 4), r[:, :, None], 2, mode="clip"),
        *(X, ROWS),
    ),
    "sorted by argsort": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0), X),
    "vmap of x[i]": (lambda x, i: jax.vmap(lambda row, j: row[j])(x[:3], i % 8), X, IDX),
    "dynamic_slice": (
        lambda x, i: (lax.dynamic_slice(x, (i, i + 1), (2, 3)), lax.dynamic_slice_in_dim(x, i, 7, 1)),
        X,
        AT,
    ),
    "dynamic_slice clamps": (lambda x, i: (lax.dynamic_slice(x, (i + 9, i), (2, 8)), jnp.roll(x, i, axis=1)), X, AT),
    "dynamic_update_slice": (lambda x, i: lax.dynamic_update_slice(x, x[:2, :2], (i, i + 9)), X, AT),
    "dynamic_update_index": (lambda x, i: lax.dynamic_update_index_in_dim(x, x[0] * 2, i, 0), X, AT),
    "at set": (lambda x, i: (x.at[i].set(0.0), x.at[:, i].set(x[:, 0]), x.at[i, i].set(5), x.at[0].set(1)), X, AT),
    "at set outside": (
        lambda x, i: (x.at[i + 2].set(0.0), x.at[i - 7].set(0.0), x.at[i + 2].set(0, mode="clip")),
        X,
        AT,
    ),
    "at set slices": (lambda x: (x.at[:, :4].set(1.0), x.at[1:3, 2:].set(x[:2, :6]), x.at[...].set(0.0)), X),
    "at add": (
        lambda x, i: (x.at[i].add(1.0), x.at[1:, i].multiply(2.0), x.at[i].max(3.0), x.at[:2].min(x[2:])),
        X,
        AT,
    ),
    "clz and popcount": (lambda b: (lax.clz(b), lax.clz(b.astype(jnp.uint8)), lax.population_count(b)), BITS),
    "bitcast": (lambda b: lax.bitcast_convert_type(lax.bitcast_convert_type(b, jnp.uint32), jnp.int32), BITS),
    "reduce_xor": (lambda b: (lax.reduce_xor(b, (0,)), lax.reduce_xor(b > 0, (0, 1))), BITS),
    "reduce_precision": (
        lambda x: tuple(lax.reduce_precision(x, *b) for b in ((8, 7), (5, 10), (5, 2), (8, 23))),
        X / 7,
    ),
    "scan of inputs": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x), X),
    "scan of a pytree": (
        lambda x: lax.scan(lambda c, r: ((c[1], c[0] + r[0]), {"a": r[1] * 2, "b": c[0]}), (x[0], x[1]), (x, x[:, 0])),
        X,
    ),
    "scan backwards": (lambda x: lax.scan(lambda c, row: (c + row, c.max()), x[0], x, reverse=True), X),
    "scan of nothing": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x[:0]), X),
    "scan without carry": (lambda x: lax.map(jnp.sum, x), X),
    "scan by length": (lambda x: lax.scan(lambda c, _: (c * 2, c[0]), x[0], length=3), X),
    "scan unrolled": (lambda x: lax.scan(lambda c, row: (c + row, row), x[0], x, unroll=2), X),
    "nested scans": (lambda x: lax.scan(lambda c, r: lax.scan(lambda d, v: (d + v, d), c, r), x[0, 0], x), X),
    "switch": (
        lambda x, i: tuple(
            lax.switch(i + n, [lambda y: y, lambda y: -y, jnp.cumsum], x[0]) for n in (-5, -2, -1, 0, 9)
        ),
        *(X, AT),
    ),
    "associative_scan": (lambda x: (lax.associative_scan(jnp.add, x, axis=1), lax.associative_scan(jnp.maximum, x)), X),
    "associative_scan of pairs": (
        lambda x: lax.associative_scan(
            lambda a, b: (a[0] + b[0], jnp.maximum(a[1] + b[0], b[1])), (x, -x), reverse=True
        ),
        X,
    ),
    "grad of x[i]": (lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x), X, AT),
    "grad of a cumsum": (lambda x: jax.grad(lambda x: (jnp.cumsum(x, 1) * x).sum())(x), X),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact(case: str) -> None:
    agrees(*EXACT[case])


SMALL = X / 8
ROUNDED: dict[str, tuple[Any, ...]] = {
    "cumlogsumexp": (lambda x: (lax.cumlogsumexp(x, 1), lax.cumlogsumexp(x, 0, reverse=True)), SMALL),
    "cumprod": (lambda x: jnp.cumprod(x, 1), SMALL),
    "quantile": (lambda x: jnp.quantile(x, 0.3, axis=1), SMALL),
    "associative_scan of affine maps": (
        lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x), axis=1),
        SMALL,
    ),
    "grad of a fori_loop": (
        lambda x: jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x[i], x[0]).sum())(x),
        SMALL,
    ),
    "grad of a scan": (
        lambda x: jax.grad(lambda x: lax.scan(lambda c, r: (jnp.sin(c) * r, c), x[0], x)[1].sum())(x),
        SMALL,
    ),
    "grad of a remat scan": (
        lambda x: jax.grad(lambda x: lax.scan(jax.checkpoint(lambda c, r: (jnp.sin(c) * r, c)), x[0], x)[1].sum())(x),
        SMALL,
    ),
    "grad of cumulatives": (
        lambda x: jax.grad(lambda x: (lax.cumlogsumexp(x, 1) + lax.cummax(x, 1) + jnp.cumprod(x, 1)).sum())(x),
        SMALL,
    ),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_rounded(case: str) -> None:
    agrees(*ROUNDED[case], exact=False)


def test_each_op_stands_for_its_function() -> None:
    """No operation above is imported as several smaller ones."""
    for function, arrays, kinds in (
        (lambda x: jnp.argmax(x, 1), (X,), {ArgReduce: 1}),
        (lambda x: jnp.cumsum(x, 1), (X,), {Scan: 1}),
        (lambda x: jnp.sort(x, 1), (X,), {Sort: 1}),
        (lambda x: lax.sort((x, -x, x), num_keys=2), (X,), {Sort: 1}),
        (lambda x: lax.top_k(x, 3), (X,), {TopK: 1, Sort: 0}),
        (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (X, IDX), {Take: 1}),
        (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1], (X,), {DynamicSlice: 1, DynamicUpdateSlice: 1}),
    ):
        ops = [type(op) for op in agrees(function, *arrays)]
        assert {kind: ops.count(kind) for kind in kinds} == kinds


# --- special values --------------------------------------------------------------------------------------------------

SPECIAL = np.array([[1, np.nan, 3, np.nan, -np.inf, np.inf, 0, -0.0], [0, -0.0, 0, -0.0, 1, 1, -1, -1]], np.float32)


def test_nan_wins_and_the_first_of_equals() -> None:
    agrees(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1), lax.cummax(x, 1), lax.cummin(x, 1)), SPECIAL)
    agrees(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1), lax.cumlogsumexp(x, 1)), SPECIAL)


def test_top_k_puts_nan_first_and_takes_the_zeros_for_equal() -> None:
    values, places = (
        interpreted(as_kernel(f, SPECIAL), (SPECIAL,))[0]
        for f in (lambda x: lax.top_k(x, 8)[0], lambda x: lax.top_k(x, 8)[1])
    )
    np.testing.assert_array_equal(places, [[1, 3, 5, 2, 0, 6, 7, 4], [4, 5, 0, 1, 2, 3, 6, 7]])
    np.testing.assert_array_equal(values, np.take_along_axis(SPECIAL, places, 1))


@COMPILED
@given(st.integers(0, 99))
def test_long_lines_with_several_extremes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.choice(np.float32([0, 1, np.nan, 5, -5]), (3, 300), p=[0.6, 0.2, 0.01, 0.095, 0.095])
    agrees(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.argsort(x, 1)), x)


# --- dtypes ----------------------------------------------------------------------------------------------------------

WIDE_DTYPES = ["float64", "int64", "uint64"]
NARROW_DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int16", "int8"]
UNSIGNED = ["uint32", "uint16", "uint8"]


def everything(x: jax.Array, i: jax.Array) -> Any:
    return (
        *(jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.sort(x, 1), jnp.argsort(x, 1), lax.top_k(x, 2), lax.cummax(x, 1)),
        *(x[i], jnp.take(x, i[None], axis=1, mode="clip"), jnp.take(x, i[None] + 99, axis=0), x.at[i].set(x[0])),
        *(lax.scan(lambda c, r: (r, c), x[0], x), jnp.cumsum(x % 2, 1).astype(x.dtype)),
    )


CELLS = [*((d, True) for d in (*WIDE_DTYPES, "float32", "int32")), *((d, False) for d in (*NARROW_DTYPES, *UNSIGNED))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dtype", "x64"), CELLS)
def test_dtypes(dtype: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        agrees(everything, np.abs(X).astype(dtype), AT)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "uint32"])
def test_index_dtypes(dtype: str) -> None:
    """The cast of an index to int32 never wraps around, as it does in JAX."""
    limits = np.iinfo(dtype)
    far = [0, 7, 100, limits.max, limits.max - 1, 2**32 % (limits.max + 1), limits.min]
    idx = np.array([*far, *(() if limits.min == 0 else (-1, -8, -9))], dtype)

    def function(x: jax.Array, idx: jax.Array) -> Any:
        starts = [(i, i) for i in idx]
        slices = jnp.stack([lax.dynamic_slice(x, start, (2, 3), allow_negative_indices=False) for start in starts])
        return jnp.take(x, idx, axis=1), jnp.take(x, idx, axis=1, mode="clip"), slices

    with jax.enable_x64(True):
        made = as_kernel(function, X, idx)
        results = jax.tree.leaves(jax.jit(made)((X, idx))), interpreted(made, (X, idx))
    numbers = [int(i) for i in idx]
    columns = [i + 8 if i < 0 else i for i in numbers]
    filled = [X[:, i] if 0 <= i < 8 else np.full(4, np.nan) for i in columns]
    slices = [X[min(max(i, 0), 2) :, min(max(i, 0), 5) :][:2, :3] for i in numbers]
    expected = np.stack(filled, 1), X[:, np.clip(np.array(numbers, object), 0, 7).astype(int)], np.stack(slices)
    for found in results:
        for got, wanted in zip(found, expected, strict=True):
            assert_same(np.asarray(got), wanted.astype(np.float32))


# --- in programs -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_places_that_depend_on_the_program() -> None:
    """The XLA backend batches programs, so that positions are vectors there."""

    def of(i: Any, x: Any) -> tuple[Any, ...]:
        part, rolled = lax.dynamic_slice(x, (i,), (3,)), jnp.roll(x, i)
        running = lax.scan(lambda c, y: (c + y * i, c), x[i], part)[1]
        placed = lax.dynamic_update_slice(x, part, (2 * i,)).at[i].add(1)
        return x[i], running, placed, jnp.argsort(rolled), lax.top_k(rolled, 2)[1], jnp.take(x, i + jnp.arange(3) - 4)

    x = jnp.asarray(X.reshape(32)[:9])
    expected = jax.vmap(of, (0, None))(jnp.arange(7), x)

    @tk.kernel(out_type=lambda _: (tuple(jax.ShapeDtypeStruct(e.shape, e.dtype) for e in expected),))
    def f(x, outputs):
        i = tk.parallel(7)
        for output, result in zip(outputs, of(i, x[...]), strict=True):
            output[i] = result

    for results in (jax.tree.leaves(jax.jit(f)(x)), interpreted(f, x)):
        for got, wanted in zip(results, expected, strict=True):
            assert_same(np.asarray(got), np.asarray(wanted))


# --- refused ---------------------------------------------------------------------------------------------------------


def test_updates_at_many_places_are_refused() -> None:
    @kernel(((4, 8), np.float32))
    def f(x, i, out):
        out[...] = x[...].at[i[...]].add(1.0)  # <-

    with refused(UnsupportedError, "this way of updating", expected="one window", got="scatter-add", fix="one-hot"):
        f(X, IDX)


def test_other_gathers_are_refused() -> None:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    @kernel(((3, 5), np.float32))
    def f(x, i, out):
        out[...] = lax.gather(x[...], i[...][:, None], numbers, (1, 5))  # <-

    with refused(UnsupportedError, "this way of indexing", expected="x[i]", got="gather of (1, 5)", fix="dynamic"):
        f(X, IDX)


def test_other_precisions_are_refused() -> None:
    @kernel(((4, 8), np.float32))
    def f(x, out):
        out[...] = lax.reduce_precision(x[...], 8, 10)  # <-

    with refused(UnsupportedError, "reduce_precision", expected="(8, 7)", got="(8, 10)", fix=".astype"):
        f(X)
