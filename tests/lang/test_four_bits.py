"""Arrays of 4-bit numbers: loaded, cast, computed with and stored, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import EXTENTS, refused
from tilekern.errors import ArgumentError, IndexingError, UnsupportedError
from tilekern.ir.types import FOUR_BITS

DTYPES = [jnp.int4, jnp.uint4, jnp.float4_e2m1fn]
TARGETS = {"cpu:xla": "jax", "cpu:llvm": "llvmlite", "cuda:sm_90": "triton", "tpu:v5e": "libtpu"}
BLOCKS = st.sampled_from([2, 4, 8])
few = settings(max_examples=5)


def codes(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Random numbers of all 16 codes, including -0."""
    drawn = np.random.default_rng(seed).integers(0, 16, shape).astype(np.uint8)
    return drawn.view(dtype)  # an array of NumPy has one in a byte


def wide(x: Any) -> np.ndarray:
    """Numbers as float32, to compare their bits."""
    return np.asarray(x).astype(np.float32)


def same(got: Any, expected: Any) -> None:
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (np.shape(expected), expected.dtype)
    np.testing.assert_array_equal(wide(got).view(np.uint32), wide(expected).view(np.uint32))


def typed(*types: tuple[tuple[int, ...], Any]) -> Callable[[Any], tk.Kernel]:
    """Decorator for a kernel whose outputs have these shapes and dtypes."""
    return tk.kernel(out_type=lambda *_: tuple(jax.ShapeDtypeStruct(*t) for t in types))


def by_tiles(x: np.ndarray, block: int) -> tk.Kernel:
    """Copy an array by tiles, in 4 bits and as float32."""

    @typed((x.shape, x.dtype), (x.shape, jnp.float32))
    def copies(x, same, wide):
        i, j = tk.parallel(x.shape[0], 3), tk.parallel(x.shape[1], block)
        same[i, j] = x[i, j]
        wide[i, j] = x[i, j].astype(jnp.float32)

    return copies


@few
@given(EXTENTS, EXTENTS, BLOCKS, st.sampled_from(DTYPES), st.integers(0, 99))
def test_copies_of_any_size(rows: int, size: int, block: int, dtype: Any, seed: int) -> None:
    x = codes((rows, size), dtype, seed)
    made = by_tiles(x, block)
    for found in (made(jnp.asarray(x)), tk.interpret(made.trace(x))(x), jax.jit(made)(x)):
        same(found[0], x)
        same(found[1], wide(x))


@pytest.mark.smoke
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_backend(dtype: Any, target: str) -> None:
    pytest.importorskip(TARGETS[target], reason=f"needs {TARGETS[target]}")
    x = codes((5, 13), dtype)
    found = by_tiles(x, 8).trace(x).lower(target).interpret(x)
    same(found[0], x)
    same(found[1], wide(x))


@tk.kernel(out_type=lambda x, w, scales: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def weight_only(x, w, scales, out, *, group: int = 8):
    """x @ w for 4-bit weights, with one scale for each `group` rows of a column."""
    i, j = tk.parallel(x.shape[0], 4), tk.parallel(w.shape[1], 8)

    def step(k, acc):
        weights = w[k, j].astype(jnp.float32) * scales[k.index, j]
        return tk.dot(x[i, k], weights.astype(x.dtype), acc)

    out[i, j] = tk.fold(tk.serial(x.shape[1], group), step, tk.zeros((i, j))).astype(out.dtype)


@pytest.mark.parametrize(
    ("dtype", "target"), [*((jnp.int4, target) for target in TARGETS), (jnp.float4_e2m1fn, "cpu:llvm")]
)
def test_a_product_with_packed_weights(dtype: Any, target: str) -> None:
    """Operands are small integers, scales are powers of two: no sum rounds."""
    pytest.importorskip(TARGETS[target], reason=f"needs {TARGETS[target]}")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, (5, 20)), jnp.bfloat16)
    w, scales = codes((20, 13), dtype), (2.0 ** rng.integers(-1, 2, (3, 13))).astype(np.float32)
    expected = wide(x) @ (wide(w) * np.repeat(scales, 8, 0)[:20])
    found = weight_only.trace(x, w, scales).lower(target).interpret(x, w, scales)
    np.testing.assert_array_equal(wide(found), wide(expected.astype(jnp.bfloat16)))


# --- transformations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "out_axis"), [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("target", ["cpu:xla", "cpu"])
def test_vmap_over_any_dim(axis: int, out_axis: int, target: str) -> None:
    """The mapped dim may also come after the dim whose pairs share a byte."""
    x = codes((3, 4, 5), jnp.int4)
    one = by_tiles(np.take(x, 0, axis), 2)
    found = jax.vmap(lambda x: one(x, target=target), axis, out_axis)(jnp.asarray(x))
    same(np.moveaxis(np.asarray(found[0]), out_axis, axis), x)
    same(np.moveaxis(np.asarray(found[1]), out_axis, axis), wide(x))


def test_derivatives_beside_packed_weights() -> None:
    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype), linear=("x",))
    def scaled(x, w, out):
        out[...] = x[...] * w[...].astype(x.dtype)

    @scaled.deftranspose
    def back(cotangent, x, w):
        return {"x": scaled(cotangent, w)}

    w = codes((5,), jnp.int4)
    x = jnp.arange(5, dtype=jnp.float32)
    same(jax.grad(lambda x: scaled(x, jnp.asarray(w)).sum())(x), wide(w))


def test_an_op_with_packed_arrays() -> None:
    x = codes((3, 5), jnp.int4)
    one = by_tiles(x, 2)

    @tk.op(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32))
    def f(x):
        return one(x)[1]

    traced = f.trace(x)
    same(traced.lower("cpu:xla").compile()(jnp.asarray(x)), wide(x))
    same(tk.interpret(traced.kernels[0])(x)[0], x)
    same(traced.kernels[0].lower("cpu").compile()(jnp.asarray(x))[1], wide(x))


def test_a_donated_array_of_pairs() -> None:
    @tk.kernel(out_type=lambda x: (), donate=("x",))
    def f(x):
        i = tk.parallel(x.shape[0], 4)
        x[i] = (x[i].astype(jnp.int8) + 1).astype(x.dtype)

    x = codes((7,), jnp.uint4)
    expected = ((x.astype(np.uint8) + 1) & 15).astype(jnp.uint4)
    same(f(jnp.asarray(x)), expected)
    same(tk.interpret(f.trace(x))(x), expected)


# --- values in bodies ------------------------------------------------------------------------------------------------


NUMBERS = np.array([0.2, 0.25, 0.75, -0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 7, -9, 1e9, np.inf, -np.inf, 0], np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16, np.int32, np.uint8])
def test_casts_to_four_bits_as_jax_does_them(dtype: Any, source: Any) -> None:
    kept = NUMBERS if jnp.issubdtype(source, jnp.floating) else np.array([0, 1, 7, 8, 15, 100, 3, 9])
    x = jnp.asarray(kept).astype(source)

    @typed((x.shape, dtype))
    def f(x, out):
        out[...] = x[...].astype(dtype)

    expected = np.asarray(x.astype(dtype))
    for found in (f(x), tk.interpret(f.trace(x))(x)):
        same(jax.tree.leaves(found)[0], expected)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_a_nan_is_cast_to_0(dtype: Any) -> None:
    x = np.array([np.nan, 1, np.nan, -1], np.float32)

    @typed((x.shape, dtype))
    def f(x, out):
        out[...] = x[...].astype(dtype)

    same(f(x)[0], np.asarray(jnp.asarray(x).astype(dtype)))


def test_a_nan_is_cast_to_0_of_e2m1() -> None:
    """E2M1 has no NaN. The sign of the 0 is that of the NaN; NumPy's cast always takes -0."""
    x = np.array([np.nan, 1, -np.nan, -1], np.float32)

    @typed((x.shape, jnp.float4_e2m1fn))
    def f(x, out):
        out[...] = x[...].astype(jnp.float4_e2m1fn)

    np.testing.assert_array_equal(wide(f(x)[0]), [0, 1, 0, -1])


def test_all_numbers_of_e2m1() -> None:
    x = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn)
    same(by_tiles(x[None], 4)(jnp.asarray(x[None]))[1], wide(x[None]))


def test_tiles_are_moved_chosen_and_compared() -> None:
    x = codes((4, 6), jnp.int4)

    def function(x: Any) -> Any:
        swapped = jnp.where(x > 2, x, jnp.asarray(-3, x.dtype)).T[::-1, 1:]
        return jnp.concatenate([swapped, swapped[:, :1]], 1).astype(jnp.int32)

    @typed(((6, 4), np.int32))
    def f(x, out):
        out[...] = function(x[...])

    expected = np.asarray(function(jnp.asarray(x).astype(jnp.int8)))
    same(f(jnp.asarray(x))[0], expected)
    same(tk.interpret(f.trace(x))(x)[0], expected)


@pytest.mark.parametrize(("start", "size"), [(0, 5), (1, 4), (3, 3), (4, 7), (10, 1)])
def test_known_parts_of_any_size_are_loaded(start: int, size: int) -> None:
    x = codes((2, 11), jnp.int4)

    @typed(((2, size), np.int32), ((2,), np.int32))
    def f(x, part, one):
        part[...] = x[:, start : start + size].astype(jnp.int32)
        one[...] = x[:, start].astype(jnp.int32)

    expected = x[:, start : start + size].astype(np.int32), x[:, start].astype(np.int32)
    for found in (f(jnp.asarray(x)), tk.interpret(f.trace(x))(x)):
        for got, wanted in zip(found, expected, strict=True):
            same(got, wanted)


def test_views_whose_pairs_stay_together() -> None:
    x = codes((4, 6), jnp.int4)

    @typed(((6, 4), np.int32), ((2, 12), jnp.int4))
    def f(x, transposed, merged):
        transposed[...] = x.T[...].astype(jnp.int32)
        merged[...] = x.reshape(2, 12)[...]

    for found in (f(jnp.asarray(x)), tk.interpret(f.trace(x))(x)):
        same(found[0], x.T.astype(np.int32))
        same(found[1], x.reshape(2, 12))


@pytest.mark.parametrize(("shape", "view"), [((4, 6), (8, 3)), ((2, 3), (6,))])
def test_views_that_separate_pairs_are_refused(shape: tuple[int, ...], view: tuple[int, ...]) -> None:
    @typed((view, np.int32))
    def f(x, out):
        out[...] = x.reshape(view)[...].astype(jnp.int32)  # <-

    with refused(
        IndexingError,
        "two numbers of x share a byte",
        expected="even",
        got=f"a view of shape {list(view)}",
        fix="outside",
    ):
        f.trace(codes(shape, jnp.int4))


def test_a_masked_load() -> None:
    x = codes((3, 8), jnp.uint4)

    @typed((x.shape, np.int32))
    def f(x, out):
        i = tk.parallel(x.shape[0], 2)
        out[i] = x.load(i, mask=jnp.arange(8) % 3 == 0).astype(jnp.int32)

    same(f(jnp.asarray(x))[0], np.where(np.arange(8) % 3 == 0, x.astype(np.int32), 0))


def test_known_arrays_of_four_bits_in_a_body() -> None:
    table = codes((6,), jnp.float4_e2m1fn)

    @typed(((6,), np.float32))
    def f(x, out):
        out[...] = x[...] + jnp.asarray(table).astype(jnp.float32)

    same(f(np.ones(6, np.float32))[0], wide(table) + 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_bytes", [np.uint8, np.int8])
def test_bitcasts_of_bytes(dtype: Any, target: str, of_bytes: Any) -> None:
    """Two numbers of a byte, the low half first, and back."""
    pytest.importorskip(TARGETS[target], reason=f"needs {TARGETS[target]}")
    x = np.random.default_rng(0).integers(0, 256, (5, 8), np.uint8).view(of_bytes)

    @typed((x.shape, np.float32), (x.shape, np.float32), (x.shape, of_bytes))
    def f(x, low, high, same):
        pairs = jax.lax.bitcast_convert_type(x[...], dtype)
        low[...] = pairs[:, :, 0].astype(jnp.float32)
        high[...] = jax.lax.index_in_dim(pairs, 1, axis=2, keepdims=False).astype(jnp.float32)
        same[...] = jax.lax.bitcast_convert_type(pairs, of_bytes)

    expected = np.stack([x.view(np.uint8) & 15, x.view(np.uint8) >> 4], axis=-1).view(dtype)
    low, high, again = f.trace(x).lower(target).interpret(x)
    same(low, wide(expected[..., 0]))
    same(high, wide(expected[..., 1]))
    np.testing.assert_array_equal(again, x)


# --- refused ---------------------------------------------------------------------------------------------------------

X = codes((4, 8), jnp.int4)


@pytest.mark.parametrize("function", [lambda x: x + x, lambda x: x @ x.T, lambda x: x << 1])
def test_arithmetic_in_four_bits_is_refused(function: Any) -> None:
    @typed(((4,), np.int32))
    def f(x, out):
        function(x[...])

    with pytest.raises(UnsupportedError, match="does not compute in int4") as raised:
        f.trace(X)
    assert "casts" in raised.value.expected and "int4[4,8]" in raised.value.got
    assert ".astype(jnp.int8)" in raised.value.fix and raised.value.loc.function == "<lambda>"


@pytest.mark.parametrize(
    ("before", "after"), [(np.uint16, jnp.int4), (jnp.int4, jnp.uint4), (np.int32, jnp.float4_e2m1fn)]
)
def test_other_bitcasts_are_refused(before: Any, after: Any) -> None:
    @typed(((4,), np.int32))
    def f(x, out):
        jax.lax.bitcast_convert_type(x[...], after)  # <-

    with refused(UnsupportedError, "a bitcast from", expected="int8 or uint8", got=str(np.dtype(after)), fix="uint8"):
        f.trace(np.zeros((4, 8), before))


def test_what_jax_itself_does_not_compute_in_four_bits_is_explained() -> None:
    @typed(((4,), np.int32))
    def f(x, out):
        out[...] = x[...].sum(1)  # <-

    with refused(
        UnsupportedError, "does not take integers of 4 bits", expected="casts", got="ValueError", fix=".astype"
    ):
        f.trace(X)


@pytest.mark.parametrize(
    ("block", "got"), [(3, "position 3 * i0"), (None, "position 1 * i0")], ids=["an odd block", "an index"]
)
def test_positions_that_may_be_odd_are_refused(block: int | None, got: str) -> None:
    @typed(((4, 8), np.int32))
    def f(x, out):
        j = tk.parallel(8, block)
        out[:, j] = x[:, j].astype(jnp.int32)  # <-

    with refused(IndexingError, "two numbers of x share a byte", expected="even position", got=got, fix="even size"):
        f.trace(X)


def test_an_index_vector_along_the_pairs_is_refused() -> None:
    @typed(((4, 2), np.int32))
    def f(x, i, out):
        out[...] = x[:, i[...]].astype(jnp.int32)  # <-

    with refused(
        IndexingError, "share a byte", got="an index vector along the last dim of x", fix="index the loaded tile"
    ):
        f.trace(X, np.array([1, 2], np.int32))


def test_a_fill_is_refused() -> None:
    @typed(((4, 8), np.int32))
    def f(x, out):
        out[...] = x.load(..., fill=1).astype(jnp.int32)  # <-

    with refused(IndexingError, "two numbers of x share a byte", got="`fill`", fix="jnp.where"):
        f.trace(X)


@pytest.mark.parametrize("part", ["odd size", "odd start", "one", "masked"])
def test_stores_of_half_a_byte_are_refused(part: str) -> None:
    @typed(((4, 8), jnp.int4))
    def f(x, out):
        index = {"odd size": (..., slice(0, 3)), "odd start": (..., slice(1, 3)), "one": (..., 2), "masked": ...}[part]
        mask = jnp.arange(8) > 2 if part == "masked" else None
        out.store(index, jnp.int4(1), mask=mask)  # <-

    with refused(IndexingError, "two numbers of out share a byte", expected="even", got="a store ", fix="store "):
        f.trace(X)


def test_atomics_of_four_bits_are_refused() -> None:
    @tk.kernel(out_type=lambda x: tk.Zeros(x))
    def f(x, out):
        out.at[...].max(x[...])  # <-

    with refused(UnsupportedError, "does not compute in int4", got="tile_atomic", fix=".astype(jnp.int8)"):
        f.trace(X)


def test_a_single_number_is_refused() -> None:
    @typed(((), np.int32))
    def f(x, out):
        out[...] = x[...].astype(jnp.int32)

    with refused(
        ArgumentError, "f cannot take a single number of 4 bits", expected="int4", got="x = int4[]", fix="reshape"
    ):
        f(jnp.int4(1))  # <-


def test_traced_arrays_of_four_bits_are_arguments() -> None:
    @jax.jit
    def outer(w):
        @typed(((4, 8), np.int32))
        def f(x, out):
            out[...] = w.astype(jnp.int32)  # <- the line of the error

        return f(X)

    with pytest.raises(UnsupportedError, match="cannot be used in a kernel") as raised:
        outer(jnp.asarray(X))
    assert "as an argument" in raised.value.fix


def test_the_table_of_wider_dtypes_has_all_numbers() -> None:
    for dtype, other in FOUR_BITS.items():
        every = np.arange(16, dtype=np.uint8).view(dtype)
        same(every.astype(other).astype(dtype), every)
