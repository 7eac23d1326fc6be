"""Transposed and reshaped views of refs: loads, stores and updates through them, and the views that are refused."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import (
    COMPILED,
    WIDE,
    before_passes,
    both,
    check,
    interpreted,
    kernel,
    like_first,
    numbers,
    refused,
)
from tilekern.errors import IndexingError

X = numbers(6, 8)
RUNS = pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])

# A step of a view: ("reshape", shape), ("transpose", axes) or ("at", index).
Step = tuple[str, tuple[Any, ...]]


# --- any chain of views, against NumPy's -----------------------------------------------------------------------------


def moved(x: Any, steps: tuple[Step, ...]) -> Any:
    """Apply the steps to a ref, or to an array of NumPy, whose results are views as well."""
    for kind, arguments in steps:
        if kind == "at":
            index = tuple(slice(*e) if isinstance(e, tuple) else e for e in arguments)
            x = x[index] if isinstance(x, np.ndarray) else x.at[index]
        else:
            x = getattr(x, kind)(arguments)
    return x


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """Draw a shape, and steps that move no element of the array."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    view = np.zeros(shape)
    steps: list[Step] = []
    for kind in draw(st.lists(st.sampled_from(["reshape", "transpose", "at"]), min_size=1, max_size=4)):
        if kind == "transpose":
            given: tuple[Any, ...] = tuple(draw(st.permutations(range(view.ndim))))
        elif kind == "at":
            given = tuple(draw(st.sampled_from([(0, n), (0, n - n // 2), (n // 2, n), n // 2])) for n in view.shape)
        else:
            given = draw(reshapes(view.shape))
        found = moved(view, ((kind, given),))
        assume(np.shares_memory(found, view))
        steps.append((kind, given))
        view = found
    return shape, tuple(steps)


def reshapes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    size = prod(shape)
    ways = [(size,), (1, *shape), (*shape, 1), tuple(n for n in shape if n != 1)]
    ways += [(n, size // n) for n in (2, 3, 4, 6) if size % n == 0]
    ways += [(*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]) for d in range(len(shape) - 1)]
    ways += [(*shape[:d], 2, n // 2, *shape[d + 1 :]) for d, n in enumerate(shape) if n % 2 == 0]
    return st.sampled_from(ways)


@tk.kernel(out_type=lambda x, *, tile, **_: jax.ShapeDtypeStruct(tile, x.dtype))
def load_view(x, out, *, tile: tuple[int, ...], steps: tuple[Step, ...]):
    view = moved(x, steps)
    assert (view.shape, view.size, view.ndim) == (tile, prod(tile), len(tile))
    out[...] = view[...]


@tk.kernel(out_type=lambda v, *, shape, **_: tk.Zeros(jax.ShapeDtypeStruct(shape, v.dtype)))
def store_view(v, out, *, shape: tuple[int, ...], steps: tuple[Step, ...]):
    view = moved(out, steps)
    i = tk.parallel(view.shape[0] if view.ndim else 1, 2)
    index = i if view.ndim else ()
    view.store(index, v[index], mask=v[index] % 3 != 0)


@RUNS
def test_a_load_reads_what_numpys_view_has(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(chains())
    def property(found: tuple[tuple[int, ...], tuple[Step, ...]]) -> None:
        shape, steps = found
        x = numbers(*shape)
        expected = moved(x, steps)
        try:
            check(load_view, x, oracle=expected, run=run, tile=expected.shape, steps=steps)
        except IndexingError as error:
            assert "without moving elements" in error.summary
            assume(False)

    property()


@RUNS
def test_a_store_writes_what_numpys_view_has(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(chains())
    def property(found: tuple[tuple[int, ...], tuple[Step, ...]]) -> None:
        shape, steps = found
        expected = np.zeros(shape, np.float32)
        view = moved(expected, steps)
        assume(isinstance(view, np.ndarray))
        value = numbers(*view.shape)
        view[...] = np.where(value % 3 != 0, value, 0)
        try:
            check(store_view, value, oracle=expected, run=run, shape=shape, steps=steps)
        except IndexingError as error:
            assert "without moving elements" in error.summary
            assume(False)

    property()


# --- as they are used ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_transposed_both_ways() -> None:
    @kernel(((8, 6), np.float32), (None))
    def f(x, turned, back):
        i, j = tk.parallel(6, 4), tk.parallel(8, 3)
        turned[j, i] = x.T[j, i]
        back.mT[j, i] = x.transpose(1, 0)[j, i]

    check(f, X, oracle=(X.T, X))


def test_heads_beside_each_other_as_a_dim() -> None:
    """[tokens, heads * width] seen as [heads, tokens, width], read and written by tiles."""

    @tk.kernel(out_type=lambda x: x)
    def f(x, out):
        h, i = tk.parallel(4), tk.parallel(x.shape[0], 4)
        heads = x.reshape(x.shape[0], 4, 2).transpose(1, 0, 2)
        out.reshape(-1, 4, 2)[i, h] = heads[h, i] * (1 + h)

    check(f, X, oracle=(X.reshape(6, 4, 2) * np.arange(1, 5, dtype=np.float32)[:, None]).reshape(6, 8))


def test_batch_and_tokens_as_one_dim() -> None:
    """Tiles of the merged dim cross the edges of the batch, and the last tile is ragged."""

    @tk.kernel(out_type=lambda x: x)
    def f(x, out):
        i = tk.parallel(15, 4)
        out.reshape(15, 2)[i] = x.reshape((-1, 2))[i] + 1

    x = numbers(3, 5, 2)
    check(f, x, oracle=x + 1)


def test_a_part_of_columns_is_split() -> None:
    @kernel(((6, 2, 2), np.float32))
    def f(x, out):
        i = tk.parallel(2)
        part = x.at[tk.ds(3 * i, 3), 4:8].reshape(3, 2, 2)
        out[tk.ds(3 * i, 3)] = part[...]

    check(f, X, oracle=X[:, 4:].reshape(6, 2, 2))


def test_updates_of_a_transposed_view() -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((6, 8), np.float32)))
    def f(x, out):
        tk.parallel(3)
        out.T.at[2:4].add(x.T[2:4], mask=x.T[2:4] > 12)

    expected = np.zeros_like(X)
    expected[:, 2:4] = np.where(X[:, 2:4] > 12, 3 * X[:, 2:4], 0)
    check(f, X, oracle=expected)


def test_moved_views_in_loops_branches_and_helpers() -> None:
    @jax.jit
    def row_sum(rows: tk.Ref) -> jax.Array:
        return rows[1].sum()

    @kernel(((8,), np.float32))
    def f(x, out):
        def step(k, carry):
            view, total = carry
            return view, total + view[k].sum(axis=1).sum()

        view, total = tk.fold(tk.serial(8, 4), step, (x.T, jnp.float32(0)))
        out[...] = view[:, 0] + total + row_sum(x.T) + row_sum(x.reshape(2, 24))

    check(f, X, oracle=X[0] + X.sum() + X[:, 1].sum() + X[3:].sum())


def test_vmap_of_reshaped_arrays() -> None:
    """The batch dim is put in front of the reshaped dims, whatever its place was."""

    @kernel(((48,), np.float32))
    def f(x, out):
        i = tk.parallel(48, 16)
        out.reshape(6, 8).reshape(48)[i] = x.reshape(48)[i]

    x = numbers(6, 3, 8)
    found = jax.vmap(f, in_axes=1)(x)
    np.testing.assert_array_equal(found, x.transpose(1, 0, 2).reshape(3, 48))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(f))(x.reshape(1, 3, 6, 1, 8)[:, :, :, 0]), x.reshape(1, 3, 48))


def test_empty_arrays() -> None:
    @kernel(((0, 4), np.float32))
    def f(x, out):
        out[...] = x.reshape(2, 0).T.reshape(0, 4)[...]

    check(f, np.zeros((0, 3), np.float32), oracle=np.zeros((0, 4), np.float32))


def test_masks_of_parts_are_computed_in_int32() -> None:
    """Also where JAX has 64 bits: a TPU has none."""

    @kernel(((8,), np.float32))
    def f(x, out):
        i = tk.parallel(8, 4)
        out[i] = x.at[2:9][i]

    for wide in (False, True):
        with jax.enable_x64(wide):
            text = str(before_passes(f, np.ones(12, np.float32)))
        assert " mask " in text and "iota() {dim=0} : i32[4]" in text and "i64" not in text


# --- refused ---------------------------------------------------------------------------------------------------------


def _part_between_whole_dims(x: Any) -> Any:
    return x.reshape(6, 4, 2).at[:, 1:3].reshape(24)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "view", [lambda x: x.T.reshape(48), lambda x: x.at[1:5, 1:].reshape(4 * 7), _part_between_whole_dims]
)
def test_a_reshape_that_would_move_elements(view: Any) -> None:
    @like_first
    def f(x, out):
        out[...] = view(x)[0]  # <-

    with pytest.raises(IndexingError, match="the view of x cannot be reshaped without moving elements") as raised:
        f.trace(X)
    assert "[" in raised.value.got and "reshape the tile" in raised.value.fix and "follow each" in raised.value.expected


def test_a_part_that_starts_where_the_split_does_not() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        out[...] = x.at[:, i + 1].reshape(6, 2, 2)[:, 0]  # <-

    with refused(IndexingError, "cannot be reshaped without", expected="a multiple", got="[6, 4] to [6, 2, 2]"):
        f.trace(X)


@pytest.mark.parametrize("shape", [(7, 7), (-1, 5), (-1, -1), (6, 8.0), (-2, 3)])
def test_a_reshape_to_another_size(shape: Any) -> None:
    @like_first
    def f(x, out):
        out[...] = x.reshape(shape)[...]  # <-

    with refused(IndexingError, "x cannot be reshaped to that", expected="48 elements", got=str(shape), fix="number"):
        f.trace(X)


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, 1, 2), ("x", 0)])
def test_axes_that_are_no_permutation(axes: Any) -> None:
    @like_first
    def f(x, out):
        out[...] = x.transpose(*axes)[...]  # <-

    with refused(IndexingError, "x cannot be transposed", expected="each of the 2 dims", got=f"axes = {axes}", fix="a"):
        f.trace(X)


def test_the_last_two_dims_of_a_vector() -> None:
    @like_first
    def f(x, out):
        out[...] = x.at[0].mT[...]  # <-

    with refused(IndexingError, "x has no two dims to exchange", expected="two dims", got="[8]", fix="leave it out"):
        f.trace(X)


@pytest.mark.parametrize("how", ["transpose", "reshape"])
def test_a_view_of_points_stays_in_its_order(how: str) -> None:
    @like_first
    def f(x, out):
        points = x.at[tk.points(jnp.zeros((2, 3), int), 0)]
        out[...] = getattr(points, how)((1, 0) if how == "transpose" else (6,))[...]  # <-

    with refused(
        IndexingError, "by index arrays of several dims cannot be", expected="vectors", got="index", fix="tile"
    ):
        f.trace(X)
