"""`serial`: a loop over a range has exactly the elements of the range."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import BLOCKS, COMPILED, EXTENTS, WIDE, both, check, interpreted, kernel, numbers, refused
from tilekern.errors import ArgumentError, TraceError

BOUND = st.integers(-5, 20)


# --- sums, counts, stores and atomics of a range ---------------------------------------------------------------------


def _types(x: Any, bounds: Any, **_: Any) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct((3,), x.dtype), tk.Zeros(like), tk.Zeros(like), tk.Sum(like)


@tk.kernel(out_type=_types)
def ranges(x, bounds, sums, copy, seen, added, *, block: int, start: int | None, stop: int | None, reverse: bool):
    """Sum a range, store and update its elements, and record its tiles and valid lanes. Bounds of None are traced."""
    axis = tk.serial(
        x.shape[0],
        block,
        start=bounds[0] if start is None else start,
        stop=bounds[1] if stop is None else stop,
        reverse=reverse,
    )

    def step(t: tk.Tile, carry: jax.Array) -> jax.Array:
        copy[t] = x[t]
        seen.at[t].max(x[t] + 1)
        added.at[t].add(x.load(t, fill=9))
        return carry + jnp.stack([x[t].sum(), jnp.float32(1), t.valid.sum().astype(x.dtype)])

    sums[:] = tk.fold(axis, step, jnp.zeros(3))


def _in_range(x: np.ndarray, bounds: np.ndarray, *, block: int, start: Any, stop: Any, reverse: bool) -> Any:
    low = max(int(bounds[0]) if start is None else start, 0)
    high = min(int(bounds[1]) if stop is None else stop, len(x))
    inside = np.arange(len(x)) >= low if low < high else np.zeros(len(x), bool)
    inside &= np.arange(len(x)) < high
    tiles = -(-high // block) - low // block if low < high else 0
    found = np.where(inside, x, np.float32(0))
    return np.float32([found.sum(), tiles, inside.sum()]), found, np.where(inside, x + 1, np.float32(0)), found


@pytest.mark.smoke
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm", "interpreted"])
def test_every_range_of_ten_elements_in_tiles_of_four(target: str) -> None:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    x, keywords = numbers(10), {"block": 4, "start": None, "stop": None, "reverse": False}
    call = tk.interpret(ranges.trace(x, np.zeros(2, np.int32), **keywords))
    if target != "interpreted":
        call = jax.jit(lambda *arrays: ranges(*arrays, target=target, **keywords))
    for low in range(-1, 13):
        for high in range(-1, 13):
            bounds = np.int32([low, high])
            for got, wanted in zip(call(x, bounds), _in_range(x, bounds, **keywords), strict=True):
                np.testing.assert_array_equal(got, wanted, str(bounds))


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_a_loop_has_the_elements_of_its_range(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(EXTENTS, BLOCKS, BOUND, BOUND, st.none() | BOUND, st.none() | BOUND, st.booleans())
    def property(extent: int, block: int, low: int, high: int, start: Any, stop: Any, reverse: bool) -> None:
        static = {"block": block, "start": start, "stop": stop, "reverse": reverse}
        check(ranges, numbers(extent), np.int32([low, high]), oracle=_in_range, run=run, **static)

    property()


@pytest.mark.parametrize(("low", "high"), [(-(2**31), 2**31 - 1), (-(2**31), 7), (3, 2**31 - 1), (2**31 - 1, -(2**31))])
def test_bounds_of_any_int32(low: int, high: int) -> None:
    keywords = {"block": 4, "start": None, "stop": None, "reverse": True}
    check(ranges, numbers(10), np.int32([low, high]), oracle=_in_range, **keywords)


# --- split-K ---------------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, **how: (jax.ShapeDtypeStruct((how["parts"],), x.dtype), tk.Sum(x)))
def split_sum(x, partial, copy, *, parts: int, block: tk.Block, static: bool):
    """Sums of equal parts; the last ones may be short or empty."""
    each = tk.cdiv(x.shape[0], parts)

    def add(t, total):
        copy.at[t].add(x[t])
        return total + x[t].sum()

    def part(p: Any) -> None:
        axis = tk.serial(x.shape[0], block, start=p * each, stop=(p + 1) * each)
        partial[p] = tk.fold(axis, add, 0.0)

    if not static:
        part(tk.parallel(parts))
    for p in range(parts if static else 0):
        part(p)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_split_sums(run: Any, static: bool) -> None:
    def oracle(x: np.ndarray, *, parts: int, **_: Any) -> Any:
        each = -(-len(x) // parts)
        return np.float32([x[p * each : (p + 1) * each].sum() for p in range(parts)]), x

    @(COMPILED if run is both else WIDE)
    @given(EXTENTS, BLOCKS, st.integers(1, 13))
    def property(extent: int, block: int, parts: int) -> None:
        check(split_sum, numbers(extent), oracle=oracle, run=run, parts=parts, block=block, static=static)

    property()


# --- what carries the range along ------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, *_: (jax.ShapeDtypeStruct((6,), x.dtype), jax.ShapeDtypeStruct((), np.int32)))
def carried(x, wide, coarse, bounds, sums, valid):
    """Sums of a range through tiles that moved and were scaled, views, views of views, and loops in loops."""
    i, j = (tk.serial(n, b, start=bounds[k], stop=bounds[k + 1]) for n, b, k in ((10, 4, 0), (7, 2, 2)))

    def step(tiles: Any, carry: Any) -> Any:
        t, u = tiles
        view = x.at[u, t]
        row = [view[...], view.at[:, tk.ds(1, 2)][...], view[:, jnp.array([3, 0])], view[:, 2], x[u, t + 2]]
        found = [tile.sum() for tile in row]
        found.append(wide[t * 2].sum() * u.valid[0])
        counted = ((t // 4).valid.sum() + (t // 2).valid.sum() * 10 + coarse[t // 2].sum() * 100) * u.valid[0]
        return carry[0] + jnp.stack(found), carry[1] + counted

    sums[:], valid[...] = tk.fold((i, j), step, (jnp.zeros(6), 0))


def _carried(x: np.ndarray, wide: np.ndarray, coarse: np.ndarray, bounds: np.ndarray) -> Any:
    found, counted = np.zeros(6, np.float32), 0
    columns, rows = range(max(bounds[0], 0), min(bounds[1], 10)), range(max(bounds[2], 0), min(bounds[3], 7))
    for u in rows:
        for t in columns:
            found[0] += x[u, t]
            found[1] += x[u, t] * (t % 4 in (1, 2))
            found[2] += x[u, t] * (t % 4 in (3, 0))
            found[3] += x[u, t] * (t % 4 == 2)
            found[4] += x[u, t + 2] if t + 2 < 10 else 0
    first = len([u for u in rows if u % 2 == 0])
    found[5] = first * sum(wide[2 * t] + wide[2 * t + 1] for t in columns)
    halves, quarters = {t // 2 for t in columns}, {t // 4 for t in columns}
    counted = first * (len(quarters) + 10 * len(halves) + 100 * sum(coarse[h] for h in halves))
    return found, np.int32(counted)


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_tiles_and_views_carry_the_range_along(run: Any) -> None:
    arrays = numbers(7, 10), numbers(20), numbers(5).astype(np.int32)

    @(COMPILED if run is both else WIDE)
    @given(st.tuples(*[st.integers(-2, 12)] * 4))
    def property(bounds: tuple[int, ...]) -> None:
        check(carried, *arrays, np.int32(bounds), oracle=_carried, run=run)

    property()


def test_a_view_of_a_range_is_passed_on() -> None:
    """The view passes through JAX's flattening, and to an atomic update."""

    @kernel(((), np.float32))
    def f(x, out):
        def step(t, total):
            return total + jax.jit(lambda ref: ref[...].sum())(x.at[t])

        out[...] = tk.fold(tk.serial(8, 4, start=1, stop=6), step, 0.0)

    check(f, numbers(8), oracle=np.float32(2 + 3 + 4 + 5 + 6))


# --- whole tiles -----------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, bounds, **_: jax.ShapeDtypeStruct((2,), x.dtype))
def whole(x, bounds, sums, *, static: bool):
    start, stop = (6, 9) if static else (bounds[0], bounds[1])
    axis = tk.serial(x.shape[0], 4, start=start, stop=stop, whole_tiles=True)
    sums[:] = tk.fold(axis, lambda t, c: c + jnp.stack([x[t].sum(), jnp.float32(1)]), jnp.zeros(2))


@pytest.mark.parametrize(
    ("low", "high", "total"), [(6, 9, [45, 2]), (5, 5, [0, 0]), (10, 12, [0, 0]), (9, 99, [19, 1])]
)
def test_whole_tiles(low: int, high: int, total: list[int]) -> None:
    """Tiles that overlap the range run with all lanes; an empty range has none."""
    check(whole, numbers(10), np.int32([low, high]), oracle=np.float32(total), static=False)


def test_whole_tiles_of_a_static_range() -> None:
    check(whole, numbers(10), np.zeros(2, np.int32), oracle=np.float32([5 + 6 + 7 + 8 + 9 + 10, 2]), static=True)


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 99), (-3, 10), (8, 10), (4, 8), (-1, 8)])
def test_ranges_of_whole_tiles_have_no_masks(start: int, stop: Any) -> None:
    @kernel(((), np.float32))
    def f(x, out):
        axis = tk.serial(10, 4, start=start, stop=stop)
        out[...] = tk.fold(axis, lambda t, total: total + x[t].sum(), 0.0)

    text = str(f.trace(numbers(10)))
    assert "mask" not in text and "select" not in text, text


@pytest.mark.parametrize("name", ["reverse", "whole_tiles"])
def test_flags_are_bools(name: str) -> None:
    @kernel(((), np.float32))
    def f(x, out):
        tk.serial(8, 4, **{name: 1})  # <-

    with refused(ArgumentError, f"{name} must be a bool", got=f"{name} = 1 (int)"):
        f.trace(numbers(8))


def test_python_does_not_loop_over_an_axis() -> None:
    @kernel(None)
    def f(x, out):
        for j in tk.serial(6, 2):  # <-
            out[j] = x[j]

    with refused(
        TraceError,
        "cannot be iterated over by Python",
        expected="tk.fold",
        got="a Python loop",
        fix="tk.fold(tk.serial(n, block), body, init), ",
    ):
        f.trace(numbers(6))
