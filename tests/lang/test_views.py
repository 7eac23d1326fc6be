"""Views of refs: `ref.at[index]`, alone, in helpers, loops and branches; page tables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.lang.checks import COMPILED, WIDE, both, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import IndexingError, OutputError, TileScopeError

X = numbers(6, 5)
PROGRAMS = 3


# --- any view of any array, against an oracle that looks at one lane at a time ---------------------------------------


@dataclass(frozen=True)
class Entry:
    """Entry of an index; `slot` is the place of a traced position in an operand."""

    kind: str
    start: int = 0
    size: int = 0
    slot: int = 0

    def of(self, tile: tk.Tile, slots: tk.Ref) -> Any:
        match self.kind:
            case "whole":
                return slice(None)
            case "slice":
                return slice(self.start, self.start + self.size)
            case "ds":
                return tk.ds(self.start, self.size)
            case "traced":
                return tk.ds(slots[self.slot], self.size)
            case "tile":
                return tile + self.start
            case "vector":
                return slots[self.slot : self.slot + self.size]
            case "scalar":
                return slots[self.slot]
            case _:
                return self.start

    def lanes(self, dim: int, program: int, slots: np.ndarray) -> list[int] | int:
        match self.kind:
            case "whole":
                return list(range(dim))
            case "vector":
                return slots[self.slot : self.slot + self.size].tolist()
            case "scalar":
                return int(slots[self.slot])
            case "int":
                return self.start
        start = {"traced": slots[self.slot], "tile": program * 3 + self.start}.get(self.kind, self.start)
        return [int(start) + n for n in range(3 if self.kind == "tile" else self.size)]


Problem = tuple[tuple[int, ...], tuple[Entry, ...], tuple[Entry, ...], tuple[int, ...]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a shape, the entries of a view, those of an index of the view, and the slots of traced positions."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 4, 7]), min_size=1, max_size=2)))
    slots: list[int] = []

    def entry(dim: int, selected: bool) -> Entry:
        kinds = ["whole", "slice", "ds", "traced", "tile", "vector", "scalar", *(["int"] if dim else [])]
        kind = "whole" if selected else draw(st.sampled_from(kinds))
        start = draw(st.integers(-2, 6))
        size = draw(st.integers(0, 4))
        if kind == "slice":
            start = draw(st.integers(0, dim))
            size = draw(st.integers(0, dim - start))
        if kind == "int":
            start = draw(st.integers(0, dim - 1))
        slot = len(slots)
        if kind in ("traced", "scalar"):
            slots.append(draw(st.integers(-2, 6)))
        if kind == "vector":
            slots.extend(draw(st.lists(st.integers(-2, 6), min_size=size, max_size=size, unique=True)))
        return Entry(kind, start, size, slot)

    first = tuple(entry(dim, False) for dim in shape)
    found = [(e, e.lanes(dim, 0, np.zeros(9, int))) for e, dim in zip(first, shape, strict=True)]
    left = [(e, len(f) if e.kind != "vector" else e.size) for e, f in found if isinstance(f, list)]
    second = tuple(entry(dim, e.kind == "vector") for e, dim in left)
    return shape, first, second, (*slots, 0)


def lanes_of(problem: Problem, program: int) -> tuple[tuple[int, ...], list[tuple[int, ...] | None]]:
    """Shape of the tile, and the array's index for each lane; None outside of the view or of the array."""
    shape, first, second, slots = problem
    known, rest = np.asarray(slots), iter(second)
    found: list[list[int | None] | int | None] = []
    for e, dim in zip(first, shape, strict=True):
        outer = e.lanes(dim, program, known)
        if isinstance(outer, int):
            found.append(outer)
            continue
        inner = next(rest).lanes(len(outer), program, known)
        picked = [outer[n] if 0 <= n < len(outer) else None for n in ([inner] if isinstance(inner, int) else inner)]
        found.append(picked[0] if isinstance(inner, int) else picked)
    tile = tuple(len(f) for f in found if isinstance(f, list))
    every = product(*(f if isinstance(f, list) else [f] for f in found))
    inside = [i if all(k is not None and 0 <= k < n for k, n in zip(i, shape, strict=True)) else None for i in every]
    return tile, inside  # pyright: ignore[reportReturnType]


def _loaded(x: Any, slots: Any, *, tile: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct((PROGRAMS, *tile), x.dtype)


@tk.kernel(out_type=_loaded)
def load_view(x, slots, out, *, first: tuple[Entry, ...], second: tuple[Entry, ...], tile: tuple[int, ...]):
    i = tk.parallel(PROGRAMS * 3, 3)
    view = x.at[tuple(e.of(i, slots) for e in first)]
    out[i.index] = view.load(tuple(e.of(i, slots) for e in second), fill=-1)


@tk.kernel(out_type=lambda value, slots, *, shape: tk.Zeros(jax.ShapeDtypeStruct((PROGRAMS, *shape), value.dtype)))
def store_view(value, slots, out, *, first: tuple[Entry, ...], second: tuple[Entry, ...], shape: tuple[int, ...]):
    i = tk.parallel(PROGRAMS * 3, 3)
    view = out.at[i.index].at[tuple(e.of(i, slots) for e in first)]
    view[tuple(e.of(i, slots) for e in second)] = value[...]


RUNS = pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])


@RUNS
def test_a_load_reads_what_is_inside_the_view_and_the_array(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(problems())
    def property(problem: Problem) -> None:
        shape, first, second, slots = problem
        x, tile = numbers(*shape), lanes_of(problem, 0)[0]
        expected = np.full((PROGRAMS, *tile), -1, np.float32)
        for program in range(PROGRAMS):
            for lane, where in zip(np.ndindex(*tile), lanes_of(problem, program)[1], strict=True):
                if where is not None:
                    expected[(program, *lane)] = x[where]
        arrays = x, np.asarray(slots, np.int32)
        check(load_view, *arrays, oracle=expected, run=run, first=first, second=second, tile=tile)

    property()


@RUNS
def test_a_store_writes_what_is_inside_the_view_and_the_array(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(problems())
    def property(problem: Problem) -> None:
        shape, first, second, slots = problem
        tile = lanes_of(problem, 0)[0]
        value, expected = numbers(*tile), np.zeros((PROGRAMS, *shape), np.float32)
        for program in range(PROGRAMS):
            for lane, where in zip(np.ndindex(*tile), lanes_of(problem, program)[1], strict=True):
                if where is not None:
                    expected[(program, *where)] = value[lane]
        arrays = value, np.asarray(slots, np.int32)
        check(store_view, *arrays, oracle=expected, run=run, first=first, second=second, shape=shape)

    property()


# --- views as arguments ----------------------------------------------------------------------------------------------


@jax.jit
def total(rows: tk.Ref) -> jax.Array:
    """Helper that is independent of the array behind its rows."""
    return tk.fold(tk.serial(rows.shape[0], 2), lambda k, acc: acc + rows[k].sum(), jnp.float32(0))


@pytest.mark.smoke
def test_a_jitted_helper_takes_views_of_any_array() -> None:
    """JAX caches its trace: the second view, and the second kernel, must not read through the first."""

    @kernel(((2, 5), np.float32))
    def columns(x, out):
        j = tk.parallel(x.shape[1])
        out[0, j] = total(x.at[:, j])
        out[1, j] = total(x.at[1:4, j])

    @kernel(((6,), np.float32))
    def rows(x, y, out):
        i = tk.parallel(x.shape[0])
        out[i] = total(x.at[i]) - total(y.at[i])

    check(columns, X, oracle=np.stack([X.sum(0), X[1:4].sum(0)]))
    check(rows, X, 3 * X, oracle=-2 * X.sum(1))
    check(columns, X + 1, oracle=np.stack([X.sum(0) + 6, X[1:4].sum(0) + 3]))


def test_a_helper_stores_to_a_view() -> None:
    def twice(source: tk.Ref, target: tk.Ref) -> None:
        target[...] = source[...] * 2

    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        twice(x.at[i], out.at[i])

    check(f, X, oracle=X * 2)


def test_views_in_loops_branches_and_carries() -> None:
    @like_first
    def f(x, out):
        j = tk.parallel(x.shape[1], 2)
        column, target = x.at[:, j], out.at[:, j]

        def step(i, view):
            target[i] = lax.cond(i % 2 == 0, lambda: view[i], lambda: -view[i])
            return view

        kept = tk.fold(tk.serial(5), step, column)
        target[5] = kept[5] + lax.fori_loop(0, 2, lambda n, v: v + column[n], jnp.zeros(2))

    expected = X * np.array([1, -1, 1, -1, 1, 1], np.float32)[:, None]
    expected[5] += X[:2].sum(0)
    check(f, X, oracle=expected)


def test_what_a_view_says_of_itself() -> None:
    seen: list[Any] = []

    @like_first
    def f(x, out):
        view = x.at[1, tk.ds(3, 4)]
        seen.extend([view.shape, view.dtype, view.ndim, view.size, view.name, x.at[...].shape, x.at[0, 0].size])
        out[...] = x.at[...].at[:][:]

    check(f, X, oracle=X)
    assert seen[:7] == [(4,), np.float32, 1, 4, "x", (6, 5), 1]


def test_a_view_of_a_scalar() -> None:
    @like_first
    def f(x, out):
        out.at[()][...] = x.at[...][()] + 1

    check(f, np.float32(2), oracle=np.float32(3))


def test_views_of_a_donated_input_see_its_stores() -> None:
    @tk.kernel(out_type=lambda x: None, donate=("x",))
    def f(x, _):
        i = tk.parallel(x.shape[0])
        row = x.at[i]
        row[1:] = row[:-1] + 1
        row[0] = row[4]

    expected = np.concatenate([X[:, 3:4] + 1, X[:, :-1] + 1], axis=1)
    check(f, X, oracle=(expected, None))


# --- page tables -----------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda kv, table, *, groups: jax.ShapeDtypeStruct((*table.shape, groups, 3), kv.dtype))
def paged(kv, table, out, *, groups: int, block: tk.Block = 2):
    """out[b, p, g] = kv[table[b, p], :, g], summed over the slots of a page for the first program of each group."""
    b = tk.parallel(table.shape[0])
    g = tk.parallel(groups)
    pages = tk.parallel(table.shape[1], block)
    out[b, pages, g] = kv[table[b, pages], :, g].sum(axis=1)


@COMPILED
@given(st.lists(st.integers(-2, 8), min_size=10, max_size=10), st.sampled_from([1, 2, 3, 4]))
def test_a_gather_by_a_page_table(entries: list[int], block: int) -> None:
    kv, table = numbers(7, 4, 2, 3), np.array(entries, np.int32).reshape(2, 5)
    inside = ((table >= 0) & (table < 7))[..., None, None]
    expected = np.where(inside, kv[np.clip(table, 0, 6)].sum(axis=2), 0)
    check(paged, kv, table, oracle=expected.astype(np.float32), groups=2, block=block)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_gathers_by_indices_of_any_integer_dtype(dtype: str) -> None:
    with jax.enable_x64(True):
        table = np.array([[5, 0, 3], [1, 1, 6]], dtype)
        check(paged, numbers(7, 2, 1, 3), table, oracle=numbers(7, 2, 1, 3)[table].sum(axis=2), groups=1)


@pytest.mark.parametrize(("dtype", "huge"), [("u4", 2**32 - 1), ("u4", 2**31), ("i8", 2**32), ("u8", 2**63 + 1)])
def test_huge_indices_do_not_wrap_around_into_the_array(dtype: str, huge: int) -> None:
    """A cast of 2**32 to int32 would be 0."""

    @kernel(((3,), np.float32), ((3,), np.float32))
    def f(x, where, vector, scalar):
        i = tk.parallel(3)
        vector.at[i][...] = x[where[...]][i.astype(int)]
        scalar[i] = x[where[i]]

    with jax.enable_x64(True):
        where = np.array([huge, 1, 2**31 - 1], dtype)
        check(f, numbers(4), where, oracle=(np.array([0, 2, 0], np.float32),) * 2)


def test_huge_negative_indices_do_not_wrap_around_either() -> None:
    @kernel(((3,), np.float32))
    def f(x, where, out):
        out[...] = x[where[...]]

    with jax.enable_x64(True):
        where = np.array([-(2**32), -(2**63), 2], np.int64)
        check(f, numbers(4), where, oracle=np.array([0, 0, 3], np.float32))


# --- refused ---------------------------------------------------------------------------------------------------------


def test_an_index_into_a_dim_that_a_vector_selected() -> None:
    @like_first
    def f(x, out):
        rows = x.at[jnp.array([1, 3])]
        out[...] = rows[0]  # <-

    with refused(
        IndexingError,
        "index 0 of x selects from a view by an index vector",
        expected="`:` for a dim that an index vector has selected",
        got="an index into such a dim",
        fix="load the view",
    ):
        f.trace(X)


@pytest.mark.parametrize("entry", ["tile", "ds", "scalar"])
def test_a_view_of_a_view_that_may_reach_past_the_first(entry: str) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        inner = {"tile": i, "ds": tk.ds(-1, 2), "scalar": x[0, 0].astype(int)}[entry]
        out[i] = x.at[1:5].at[inner][...]  # <-

    with refused(
        IndexingError,
        "a view of a view of x may reach past the first one",
        expected="static indices inside the view",
        got="a part of the array already",
        fix="index x itself",
    ):
        f.trace(X)


@pytest.mark.parametrize(
    ("index", "got", "wanted"),
    [(2, "2", "indices in [-2, 2)"), (-3, "-3", "indices in [-2, 2)"), (slice(0, 3), "0:3", "slice bounds in [-2, 2]")],
)
def test_a_static_index_past_the_view(index: Any, got: str, wanted: str) -> None:
    """The index is inside of the array, but outside of the view."""

    @like_first
    def f(x, out):
        out[...] = x.at[2:4].at[index][...]  # <-

    with refused(
        IndexingError,
        "static index 0 of x is out of range",
        expected=f"{wanted} of a dim of 2 elements",
        got=f"index 0 = {got}",
        fix="tk.ds or a Tile",
    ):
        f.trace(X)


def test_more_entries_than_the_view_has_dims() -> None:
    @like_first
    def f(x, out):
        out[...] = x.at[1][:, 0]  # <-

    with refused(IndexingError, "x has 1 dims and is indexed with 2 entries", expected="at most 1", got="shape [5]"):
        f.trace(X)


def test_a_gather_index_of_the_wrong_dtype() -> None:
    @like_first
    def f(x, out):
        out[...] = x[x[0] * 1.0]  # <-

    with refused(
        IndexingError,
        "index 0 of x is of the wrong kind",
        expected="a vector of integers",
        got="index 0 = float32[5]",
        fix="make floats integers",
    ):
        f.trace(X)


def test_a_bool_vector_is_no_gather() -> None:
    @like_first
    def f(x, out):
        out[...] = x[x[:, 0] > 1]  # <-

    with refused(IndexingError, "index 0 of x is of the wrong kind", got="index 0 = bool[6]", fix="mask=..."):
        f.trace(X)


def test_a_view_by_a_tile_that_has_ended() -> None:
    @like_first
    def f(x, out):
        kept: list[tk.Tile] = []
        tk.foreach(tk.serial(6, 2), kept.append)
        out[...] = x.at[kept[0]][...]  # <-

    with refused(
        TileScopeError, "after the fold over", expected="inside", got="a Tile", fix="use the tile in the body"
    ):
        f.trace(X)


def test_a_store_to_a_view_of_an_input() -> None:
    @like_first
    def f(x, out):
        x.at[0][1:] = out[0, 1:]  # <-

    with refused(OutputError, "x is an input and cannot be stored to", got="x: ref<f32[6, 5], in>", fix="out_type"):
        f.trace(X)


@pytest.mark.parametrize(
    ("name", "fix"), [("get", "out[index]"), ("set", "out[index] = value"), ("multiply", "out[index] = ")]
)
def test_updates_of_jax_arrays_name_what_a_ref_has(name: str, fix: str) -> None:
    @like_first
    def f(x, out):
        getattr(out.at[...], name)(x[...])  # <-

    with refused(IndexingError, f"a ref has no .at[...].{name}(...)", expected="atomic", fix=fix):
        f.trace(X)
