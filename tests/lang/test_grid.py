"""Grids of several axes and their orders, folds over several axes, and tiles at any place."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import BLOCKS, COMPILED, EXTENTS, WIDE, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import ArgumentError, CarryError, TileScopeError, TraceError

X = numbers(6, 5)
ORDERS = [None, 1, 2, 8]


# --- grid and parallel -----------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, **_: (x, jax.ShapeDtypeStruct(x.shape, np.int32)))
def number_programs(x, out, program, *, group: int | None, bm: tk.Block = 1, bn: tk.Block = 1):
    i, j = tk.grid((x.shape[0], bm), (x.shape[1], bn), order=group and tk.grouped(group))
    out[i, j] = x[i, j]
    program[i, j] = i.index * 100 + j.index


@COMPILED
@given(EXTENTS, EXTENTS, BLOCKS, BLOCKS, st.sampled_from(ORDERS))
def test_a_grid_covers_every_tile_once_in_any_order(m: int, n: int, bm: int, bn: int, group: int | None) -> None:
    x = numbers(m, n)
    program = (np.arange(m)[:, None] // bm * 100 + np.arange(n) // bn).astype(np.int32)
    check(number_programs, x, oracle=(x, program), group=group, bm=bm, bn=bn)


def test_axes_without_blocks_are_indices() -> None:
    @like_first
    def f(x, out):
        i, (j, _) = 0, tk.grid(x.shape[0], (x.shape[1], 2))
        assert i == 0 and j.shape == () and j.dtype == jnp.int32
        out[j, _] = x[j, _]

    check(f, X, oracle=X)


def test_a_grid_of_no_axes_is_one_program() -> None:
    @like_first
    def f(x, out):
        assert tk.grid() == ()
        out[...] = x[...]

    check(f, X, oracle=X)


@pytest.mark.parametrize("group", ORDERS)
def test_the_order_of_a_grid_is_in_the_ir(group: int | None) -> None:
    axes = number_programs.trace(X, group=group, bm=2, bn=2).ir.axes
    assert [(a.extent, a.block, a.group, a.descending) for a in axes] == [(6, 2, group or 0, False), (5, 2, 0, False)]


@pytest.mark.parametrize(("order", "descending"), [(None, False), ("ascending", False), ("descending", True)])
def test_the_order_of_an_axis_is_in_the_ir_and_changes_nothing(order: Any, descending: bool) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4, order=order)
        out[i] = x[i] + i.index

    check(f, X, oracle=X + np.arange(6, dtype=np.float32)[:, None] // 4)
    assert [a.descending for a in f.trace(X).ir.axes] == [descending]


@pytest.mark.parametrize("order", ["up", 1, tk.grouped(2)])
def test_an_order_that_parallel_does_not_know(order: Any) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2, order=order)  # <-
        out[i] = x[i]

    with refused(
        ArgumentError, "tk.parallel does not know this order", expected="'descending'", got="order = ", fix="tk.grid"
    ):
        f.trace(X)


@pytest.mark.parametrize(("axes", "order"), [((6, 5), "descending"), ((6,), tk.grouped(2)), ((), tk.grouped(2))])
def test_an_order_that_grid_does_not_know(axes: tuple[int, ...], order: Any) -> None:
    @like_first
    def f(x, out):
        tk.grid(*axes, order=order)  # <-

    with refused(
        ArgumentError,
        "tk.grid does not know this order",
        expected="two axes",
        got=f"{len(axes)} axes",
        fix="leave order",
    ):
        f.trace(X)


@pytest.mark.parametrize(("size", "got"), [(0, "0"), (2.5, "2.5 (float)")])
def test_a_group_must_be_positive(size: Any, got: str) -> None:
    with refused(ArgumentError, "the size of tk.grouped must be a static integer", expected=">= 1", got=got, fix="int"):
        tk.grouped(size)  # <-


def test_a_grid_outside_of_a_kernel() -> None:
    with refused(TraceError, "tk.parallel is used outside a kernel", expected="kernel", got="no kernel", fix="body"):
        tk.grid(3)  # <-


@pytest.mark.parametrize("axis", [(6, 0), (-1, 2), (6, 2.0), ("a", 2)])
def test_an_axis_that_is_none(axis: Any) -> None:
    @like_first
    def f(x, out):
        tk.grid(axis)  # <-

    with refused(ArgumentError, "must be a static integer of at least", expected=">=", got=" = ", fix="x.shape"):
        f.trace(X)


# --- folds over several axes -----------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, bounds, **_: jax.ShapeDtypeStruct((), np.float32))
def ordered_sum(x, bounds, out, *, bm: tk.Block, bn: tk.Block, reverse: bool):
    """Sum whose value depends on the order of the tiles."""
    rows = tk.serial(x.shape[0], bm, reverse=reverse)
    columns = tk.serial(x.shape[1], bn, start=bounds[0], stop=bounds[1])

    def step(tiles, acc):
        i, j = tiles
        return acc * 2 % 1021 + x[i, j].sum()

    out[...] = tk.fold((rows, columns), step, jnp.float32(0))


@WIDE
@given(EXTENTS, EXTENTS, BLOCKS, BLOCKS, st.booleans(), st.integers(-3, 9), st.integers(-3, 20))
def test_the_last_axis_runs_fastest(m: int, n: int, bm: int, bn: int, reverse: bool, start: int, stop: int) -> None:
    x = numbers(m, n)
    low, high = (min(max(bound, 0), n) for bound in (start, stop))
    rows = range(0, m, bm)
    total = np.float32(0)
    columns = range(low // bn * bn, high, bn) if low < high else ()
    for i, j in product(reversed(rows) if reverse else rows, columns):
        total = np.float32(total * 2 % 1021 + x[i : i + bm, max(j, low) : min(j + bn, high)].sum())
    bounds = np.array([start, stop], np.int32)
    check(ordered_sum, x, bounds, oracle=total, run=interpreted, bm=bm, bn=bn, reverse=reverse)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_compiled_fold_over_two_axes(reverse: bool) -> None:
    x, total = numbers(5, 4), np.float32(0)
    for i, j in product([4, 2, 0] if reverse else [0, 2, 4], [0, 3]):
        total = np.float32(total * 2 % 1021 + x[i : i + 2, j : j + 3].sum())
    check(ordered_sum, x, np.array([0, 4], np.int32), oracle=total, bm=2, bn=3, reverse=reverse)


def test_indices_tiles_and_several_carries() -> None:
    @kernel(((), np.int32), ((), np.float32))
    def f(x, count, out):
        def step(at, carry):
            c, i, k = at
            assert c.shape == () and k.size == 2
            counts, total = carry
            return {"count": counts["count"] + c}, total + x[i, k].sum()

        axes = tk.serial(3), tk.serial(6), tk.serial(5, 2)
        counts, out[...] = tk.fold(axes, step, ({"count": 0}, jnp.float32(0)))
        count[...] = counts["count"]

    check(f, X, oracle=(np.int32(54), np.float32(3 * X.sum())))


def test_a_foreach_over_two_axes_stores_every_tile() -> None:
    @like_first
    def f(x, out):
        def step(at):
            i, j = at
            out[i, j] = x[i, j] * 2

        tk.foreach((tk.serial(6, 4), tk.serial(5, 3)), step)

    check(f, X, oracle=X * 2)


def test_a_fold_over_no_axes_runs_once() -> None:
    @like_first
    def f(x, out):
        out[...] = tk.fold((), lambda tiles, acc: acc + len(tiles) + 1, x[...])

    check(f, X, oracle=X + 1)


def test_one_of_several_axes_that_is_none() -> None:
    @like_first
    def f(x, out):
        out[...] = tk.fold((tk.serial(6), 5), lambda t, acc: acc, x[...])  # <-

    with refused(ArgumentError, "tk.fold loops over a serial axis", expected="tk.serial(", got="axis = 5", fix="wrap"):
        f.trace(X)


def test_an_inner_carry_of_another_type() -> None:
    @like_first
    def f(x, out):
        axes = tk.serial(6), tk.serial(5)
        out[...] = tk.fold(axes, lambda at, acc: acc.astype(int), x[...])  # <-

    with refused(CarryError, "changed the type of carry", expected="float32[6, 5]", got="int32[6, 5]", fix="init"):
        f.trace(X)


def test_tiles_of_an_inner_axis_end_with_it() -> None:
    @like_first
    def f(x, out):
        kept: list[Any] = []
        tk.foreach((tk.serial(6, 2), tk.serial(5, 5)), lambda at: kept.extend(at))
        out[...] = x[kept[1].indices]  # <-

    with refused(TileScopeError, "is used after the fold over", expected="inside", got="a Tile", fix="compute"):
        f.trace(X)


# --- tiles at any place ----------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, order, **_: x)
def permuted(x, order, out, *, block: tk.Block):
    """Programs read the tiles of x in a given order."""
    i = tk.parallel(order.shape[0])
    t = tk.tile(x.shape[0], block, order[i])
    out[t] = jnp.where(t.valid, x[t] + t.index, jnp.nan)


@COMPILED
@given(st.sampled_from([1, 7, 8, 13]), BLOCKS, st.randoms(use_true_random=False))
def test_tiles_in_a_permuted_order(extent: int, block: int, random: Any) -> None:
    order = list(range(tk.cdiv(extent, block)))
    random.shuffle(order)
    x = numbers(extent)
    check(permuted, x, np.array(order, np.int32), oracle=x + np.arange(extent, dtype=np.float32) // block, block=block)


def test_tiles_outside_of_the_axis_read_nothing() -> None:
    @kernel(((4, 3), np.float32))
    def f(x, out):
        for n, t in enumerate((-1, 0, 1, 2)):
            tile = tk.tile(5, 3, t)
            assert (tile.start, tile.stop, tile.size, tile.index) == (3 * t, 3 * t + 3, 3, t)
            out[n] = jnp.where(tile.valid, x.load(tile, fill=7), -x.load(tile, fill=7))

    check(f, numbers(5), oracle=np.array([[-7] * 3, [1, 2, 3], [4, 5, -7], [-7] * 3], np.float32))


@pytest.mark.parametrize(
    ("extent", "block", "index", "got"),
    [(5, 0, 0, "block = 0"), (-1, 2, 0, "extent = -1"), (5, 2, 1.5, "the index of tk.tile = 1.5 (float)")],
)
def test_a_tile_of_no_place(extent: int, block: int, index: Any, got: str) -> None:
    @like_first
    def f(x, out):
        tk.tile(extent, block, index)  # <-

    with refused(ArgumentError, "must be a", expected="int", got=got, fix="int"):
        f.trace(X)


def test_a_tile_outside_of_a_kernel() -> None:
    with refused(TraceError, "tk.tile is used outside a kernel", expected="kernel", got="no kernel", fix="body"):
        tk.tile(5, 2, 0)  # <-
