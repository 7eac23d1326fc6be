"""`tk.points`: index arrays that are paired element by element, in loads, stores, updates and views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import COMPILED, WIDE, both, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import IndexingError, TileScopeError

X = numbers(6, 5)
ROWS = np.array([0, 3, 3, 6, 2, -1], np.int32)
COLUMNS = np.array([1, 2, 2, 0, 5, 0], np.int32)


# --- any points of any array, against an oracle that looks at one lane at a time -------------------------------------


@dataclass(frozen=True)
class Problem:
    """Points of a transposed array: dims `first`, `first` + 1, ... of the view are indexed together.

    Attributes:
      shape: of the array.
      axes: the order of its dims in the view.
      first: the first dim that the points index; the dims beside are whole.
      indices: an index array for each dim.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    first: int
    indices: tuple[np.ndarray, ...]

    @property
    def points(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(index.shape for index in self.indices))

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dims of the view before the points, and dims after them."""
        view = tuple(self.shape[axis] for axis in self.axes)
        return view[: self.first], view[self.first + len(self.indices) :]

    @property
    def tile(self) -> tuple[int, ...]:
        before, behind = self.sides
        return (*before, *self.points, *behind)

    def lanes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | None]]:
        """Index in the view for each lane of the tile; None outside of the array."""
        before, behind = self.sides
        wide = np.broadcast_arrays(*self.indices)
        view = [self.shape[axis] for axis in self.axes]
        for outer in np.ndindex(*before):
            for point in np.ndindex(*self.points):
                for inner in np.ndindex(*behind):
                    where = (*outer, *(int(w[point]) for w in wide), *inner)
                    inside = all(0 <= i < n for i, n in zip(where, view, strict=True))
                    yield (*outer, *point, *inner), where if inside else None


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.sampled_from([1, 4, 5]), min_size=rank, max_size=rank)))
    axes = tuple(draw(st.permutations(range(rank))))
    count = draw(st.integers(1, rank))
    whole = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 4]), max_size=2)))

    def index() -> np.ndarray:
        form = tuple(draw(st.sampled_from([n, 1])) for n in whole[draw(st.integers(0, len(whole))) :])
        entries = draw(st.lists(st.integers(-2, 6), min_size=int(np.prod(form)), max_size=int(np.prod(form))))
        return np.array(entries, np.int32).reshape(form)

    return Problem(shape, axes, draw(st.integers(0, rank - count)), tuple(index() for _ in range(count)))


def entry(problem: Any, indices: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * problem, tk.points(*(index[...] for index in indices)))


@tk.kernel(out_type=lambda x, indices, *, tile, **_: jax.ShapeDtypeStruct((2, *tile), x.dtype))
def load_points(x, indices, out, *, tile: tuple[int, ...], axes: tuple[int, ...], first: int):
    i = tk.parallel(2)
    out[i] = x.transpose(axes).load(entry(first, indices), fill=-1)


@tk.kernel(out_type=lambda v, indices, *, shape, **_: tk.Zeros(jax.ShapeDtypeStruct(shape, v.dtype)))
def store_points(v, indices, out, *, shape: tuple[int, ...], axes: tuple[int, ...], first: int):
    out.transpose(axes)[entry(first, indices)] = v[...]


@tk.kernel(out_type=lambda v, indices, *, shape, **_: tk.Zeros(jax.ShapeDtypeStruct(shape, v.dtype)))
def add_points(v, indices, out, *, shape: tuple[int, ...], axes: tuple[int, ...], first: int):
    out.at[...].transpose(axes).at[entry(first, indices)].add(v[...], mask=v[...] % 3 != 0)


RUNS = pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])


@RUNS
def test_a_load_reads_each_point(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(problems())
    def property(problem: Problem) -> None:
        x = numbers(*problem.shape)
        expected = np.full((2, *problem.tile), -1, np.float32)
        for lane, where in problem.lanes():
            if where is not None:
                expected[(slice(None), *lane)] = x.transpose(problem.axes)[where]
        keywords = {"tile": problem.tile, "axes": problem.axes, "first": problem.first}
        check(load_points, x, problem.indices, oracle=expected, run=run, **keywords)

    property()


@RUNS
def test_a_store_writes_each_point(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(problems())
    def property(problem: Problem) -> None:
        value, expected = np.zeros(problem.tile, np.float32), np.zeros(problem.shape, np.float32)
        for lane, where in problem.lanes():  # points that are met twice are given the same value
            if where is not None:
                value[lane] = 1 + np.dot(where, (100, 10, 1)[: len(where)])
                expected.transpose(problem.axes)[where] = value[lane]
        keywords = {"shape": problem.shape, "axes": problem.axes, "first": problem.first}
        check(store_points, value, problem.indices, oracle=expected, run=run, **keywords)

    property()


@RUNS
def test_an_update_counts_a_point_as_often_as_it_is_given(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(problems())
    def property(problem: Problem) -> None:
        value = np.arange(np.prod(problem.tile), dtype=np.int32).reshape(problem.tile)
        expected = np.zeros(problem.shape, np.int32)
        for lane, where in problem.lanes():
            if where is not None and value[lane] % 3:
                expected.transpose(problem.axes)[where] += value[lane]
        keywords = {"shape": problem.shape, "axes": problem.axes, "first": problem.first}
        check(add_points, value, problem.indices, oracle=expected, run=run, **keywords)

    property()


# --- as they are used ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_one_logit_a_row() -> None:
    @kernel(((6,), np.float32))
    def chosen(x, labels, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x.load(tk.points(i, labels[i]), fill=-1.0)

    labels = np.array([4, 0, 5, -1, 2, 2], np.int32)
    check(chosen, X, labels, oracle=np.array([5, 6, -1, -1, 23, 28], np.float32))


def test_take_along_axis() -> None:
    @kernel(((6, 3), np.float32), ((4, 5), np.float32))
    def taken(x, columns, rows, along_rows, along_columns):
        i = tk.parallel(6, 4)
        along_rows[i] = x[tk.points(i.indices[:, None], columns[i])]
        along_columns[i] = x[tk.points(rows[i], jnp.arange(5))]

    columns, rows = np.arange(18).reshape(6, 3) * 7 % 5, np.arange(20).reshape(4, 5) * 11 % 6
    expected = np.take_along_axis(X, columns, 1), np.take_along_axis(X, rows, 0)
    check(taken, X, columns.astype(np.int32), rows.astype(np.int32), oracle=expected)


def test_arrays_of_two_dims_follow_numpy() -> None:
    @kernel(((6, 2), np.float32), ((3, 2), np.float32), ((6, 1, 2), np.float32))
    def indexed(x, columns, pairs, product, beside):
        rows = jnp.array([5, 0, 2])[:, None]
        pairs[...] = x[jnp.arange(6)[:, None], columns[...]]
        product[...] = x[rows, jnp.array([[4, 1]])]
        beside[...] = x[:, jnp.array([[3, 0]])]

    columns = np.arange(12).reshape(6, 2) % 5
    expected = X[np.arange(6)[:, None], columns], X[np.ix_([5, 0, 2], [4, 1])], X[:, np.array([[3, 0]])]
    check(indexed, X, columns.astype(np.int32), oracle=expected)


def test_vectors_by_themselves_stay_orthogonal() -> None:
    @kernel(((2, 2), np.float32), ((2,), np.float32))
    def f(x, product, pairs):
        rows, columns = jnp.array([5, 0]), jnp.array([4, 1])
        product[...] = x[rows, columns]
        pairs[...] = x[tk.points(rows, columns)]

    check(f, X, oracle=(X[np.ix_([5, 0], [4, 1])], X[[5, 0], [4, 1]]))


def test_integers_and_static_negative_ones_among_points() -> None:
    @kernel(((3,), np.float32), ((), np.float32))
    def f(x, row, out, one):
        out[...] = x[tk.points(-1, jnp.array([4, 1, 0]))] + x[tk.points(row[()], jnp.array([4, 1, 0]))]
        one[()] = x[tk.points(row[()], 2)]

    check(f, X, np.int32(2), oracle=(X[-1, [4, 1, 0]] + X[2, [4, 1, 0]], X[2, 2]))


def test_points_of_parts_and_parts_beside_points() -> None:
    """Lanes outside of the part are out of bounds, also if the array has these elements."""

    @kernel(((6, 3), np.float32), ((2, 6), np.float32))
    def f(x, r, c, inside, beside):
        y = x.reshape(2, 3, 5)
        inside[...] = x.at[1:5, 1:4].load(tk.points(r[...], c[...]), fill=-1)[:, None] * jnp.ones(3)
        beside[...] = y.at[:, 1:][:, tk.points(r[...], c[...])]

    def part(rows: Any, columns: Any, shape: tuple[int, int]) -> np.ndarray:
        return (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])

    y = X.reshape(2, 3, 5)[:, 1:]
    first = np.where(part(ROWS, COLUMNS, (4, 3)), X[1:5, 1:4][ROWS.clip(0, 3), COLUMNS.clip(0, 2)], -1)
    second = np.where(part(ROWS, COLUMNS, (2, 5)), y[:, ROWS.clip(0, 1), COLUMNS.clip(0, 4)], 0)
    check(f, X, ROWS, COLUMNS, oracle=(first[:, None] * np.ones(3, np.float32), second))


def test_lanes_from_outside_address_nothing() -> None:
    @tk.kernel(out_type=lambda x, r, c: tk.Zeros(jax.ShapeDtypeStruct((6, 5), np.int32)))
    def f(x, r, c, out):
        i = tk.parallel(6, 4)
        out.at[tk.points(r[i], 2 * c[i] // 2)].add(1)

    expected = np.zeros((6, 5), np.int32)
    np.add.at(expected, (ROWS[:3], COLUMNS[:3]), 1)
    check(f, X, ROWS, COLUMNS, oracle=expected)


def test_tiles_of_a_loop_that_stops_inside_of_one() -> None:
    """Lanes outside of the loop's range read the fill value, and add nothing."""

    @tk.kernel(
        out_type=lambda x, c: (jax.ShapeDtypeStruct((), np.float32), tk.Zeros(jax.ShapeDtypeStruct((6,), np.int32)))
    )
    def f(x, c, total, counts):
        def step(k, total):
            counts.at[tk.points(k)].add(1)
            return total + x[tk.points(k, c[k])].sum()

        total[()] = tk.fold(tk.serial(6, 4, start=1, stop=5), step, jnp.float32(0))

    columns = np.array([4, 3, 2, 1, 0, 1], np.int32)
    counted = (np.arange(6) >= 1) & (np.arange(6) < 5)
    check(f, X, columns, oracle=(np.where(counted, X[np.arange(6), columns], 0).sum(), counted.astype(np.int32)))


# --- refused ---------------------------------------------------------------------------------------------------------


def test_points_that_do_not_broadcast() -> None:
    @like_first
    def f(x, out):
        out[...] = x[tk.points(jnp.arange(3), jnp.arange(4))]  # <-

    with refused(IndexingError, "the indices of tk.points do not go", expected="broadcast", got="[3], [4]", fix="one"):
        f.trace(X)


@pytest.mark.parametrize(
    ("index", "got"), [(slice(None), "slice"), (1.5, "1.5"), (True, "True"), (np.ones(2, bool), "bool[2]")]
)
def test_points_of_the_wrong_kind(index: Any, got: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[tk.points(0, index)]  # <-

    with refused(IndexingError, "index 1 of tk.points is of the wrong kind", expected="a Tile", got=got, fix="beside"):
        f.trace(X)


def test_no_points() -> None:
    @like_first
    def f(x, out):
        out[...] = x[tk.points()]  # <-

    with refused(
        IndexingError, "tk.points is given no index", expected="each indexed", got="tk.points()", fix="at least"
    ):
        f.trace(X)


def test_more_points_than_dims() -> None:
    @like_first
    def f(x, out):
        out[...] = x[tk.points(0, 1), 0]  # <-

    with refused(IndexingError, "x has 2 dims and is indexed with 3 entries", expected="at most 2", got="Points"):
        f.trace(X)


def test_a_static_point_out_of_range() -> None:
    @like_first
    def f(x, out):
        out[...] = x[tk.points(jnp.arange(3), 5)]  # <-

    with refused(IndexingError, "static index 1 of x is out of range", expected="[-5, 5)", got="index 1 = 5", fix="ds"):
        f.trace(X)


def test_index_arrays_that_may_go_together_or_not() -> None:
    @like_first
    def f(x, out):
        out[...] = x[jnp.arange(3), jnp.zeros((2, 3), int)]  # <-

    with refused(
        IndexingError,
        "the index arrays of x may go together or each for itself",
        expected="the same number of dims",
        got="0: int32[3], 1: int32[2, 3]",
        fix="tk.points(rows, columns)",
    ):
        f.trace(X)


def test_points_across_another_index_vector() -> None:
    @like_first
    def f(x, out):
        y = x.reshape(2, 3, 5).transpose(0, 2, 1)
        out[...] = y[tk.points(jnp.arange(2), jnp.arange(2)), jnp.arange(2)]  # <-

    with refused(
        IndexingError, "index arrays of x go together across", expected="no other", got="between", fix="one tk.points"
    ):
        f.trace(X)


def test_an_index_into_a_dim_of_points() -> None:
    @like_first
    def f(x, out):
        out[...] = x.at[tk.points(jnp.zeros((2, 3), int), 1)][0]  # <-

    with refused(IndexingError, "index 0 of x selects from a view by an index vector", expected="`:`", fix="load"):
        f.trace(X)


def test_a_tile_that_has_ended_among_points() -> None:
    @like_first
    def f(x, out):
        kept: list[tk.Tile] = []
        tk.foreach(tk.serial(6, 2), kept.append)
        out[...] = x[tk.points(kept[0], 0)]  # <-

    with refused(TileScopeError, "after the fold over", expected="inside", got="a Tile", fix="in the body"):
        f.trace(X)
