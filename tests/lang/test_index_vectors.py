"""Index vectors with lanes that were read outside of an array: these lanes address no element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import WIDE, check, interpreted, kernel, like_first
from tilekern.testing.programs.index_vectors import chain

COUNTS = (tk.Zeros, 6)


def counts(size: int = 6) -> Any:
    return lambda *_, **__: tk.Zeros(jax.ShapeDtypeStruct((size,), np.int32))


# --- the three kinds of access ---------------------------------------------------------------------------------------

X = np.array([3, 1, 0, 5, 1, 1, 2, 0, 4, 5], np.int32)


def test_an_update_leaves_tails_out() -> None:
    @tk.kernel(out_type=counts())
    def histogram(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[x[i]].add(1)

    check(histogram, X, oracle=np.bincount(X, minlength=6).astype(np.int32))


def test_a_store_leaves_tails_out() -> None:
    @like_first
    def permuted(v, where, out):
        i = tk.parallel(v.shape[0], 4)
        out[where[i]] = v[i]

    order = np.array([4, 2, 9, 0, 1, 8, 3, 7, 6, 5], np.int32)
    values = np.arange(10, 20).astype(np.float32)
    expected = np.zeros_like(values)
    expected[order] = values
    check(permuted, values, order, oracle=expected)


def test_a_load_reads_the_fill_for_tails() -> None:
    @kernel(((12,), np.float32))
    def looked_up(table, where, out):
        i = tk.parallel(12, 4)
        out[i] = table.load(where[i], fill=-1.0)

    table = np.arange(7, 13).astype(np.float32)
    check(looked_up, table, X, oracle=np.append(table[X], [-1, -1]).astype(np.float32))


def test_a_place_from_outside_selects_a_vector() -> None:
    """The fourth start is read outside of `starts`, so it is 0; the vector there comes from inside of `x`."""

    @tk.kernel(out_type=lambda starts, x: counts()())
    def histogram(starts, x, out):
        start = starts[tk.parallel(4)]
        out.at[x[tk.ds(start, 4)]].add(1)

    starts = np.array([2, 8, 9], np.int32)
    read = [X[start : start + 4] for start in (*starts, 0)]
    check(histogram, starts, X, oracle=np.bincount(np.concatenate(read), minlength=6).astype(np.int32))


# --- chains of ops, against a model that looks at one lane at a time ----------------------------------------------


@given(st.data())
@WIDE
def test_what_comes_from_outside_addresses_nothing(data: st.DataObject) -> None:
    found = chain(lambda most: data.draw(st.integers(0, most)))
    for got, expected in zip(interpreted(found.kernel, *found.arrays), found.expected, strict=True):
        np.testing.assert_array_equal(got, expected)


# --- loops and branches ----------------------------------------------------------------------------------------------


def test_a_loop_that_loads_by_its_vector() -> None:
    """Each lane follows the array's links to 0 or 1; lanes past the extent follow no link."""

    @tk.kernel(out_type=counts())
    def followed(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[jax.lax.while_loop(lambda v: (x[v] > 1).any(), lambda v: x[v], x[i])].add(1)

    steps, expected = np.array([0, 0, 1, 2, 3, 4, 2, 0, 4, 5], np.int32), np.zeros(6, np.int32)
    for start in range(0, 10, 4):
        v = steps[start : start + 4]
        while (steps[v] > 1).any():
            v = steps[v]
        expected += np.bincount(v, minlength=6).astype(np.int32)
    check(followed, steps, oracle=expected)


def test_a_vector_that_a_scan_stacks() -> None:
    @tk.kernel(out_type=counts())
    def scanned(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[jax.lax.scan(lambda last, v: (v, jnp.maximum(last, v)), x[0], x[i])[1]].add(1)

    before = np.append(X[:1], X[:-1])
    before[::4] = X[0]
    check(scanned, X, oracle=np.bincount(np.maximum(before, X), minlength=6).astype(np.int32))


def test_a_branch_that_fills() -> None:
    @tk.kernel(out_type=counts())
    def filled(x, out, *, tile):
        i = tk.parallel(x.shape[0], 4)
        out.at[jax.lax.cond(i.index == tile, lambda: x.load(i, fill=5), lambda: x[i])].add(1)

    for tile in (0, 2):
        padded = np.append(X, [5, 5]) if tile == 2 else X
        check(filled, X, tile=tile, oracle=lambda *_, **__: np.bincount(padded, minlength=6).astype(np.int32))  # noqa: B023


# --- under vmap ------------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, v: (tk.Zeros(jax.ShapeDtypeStruct((6,), np.int32)), tk.Zeros(v)))
def counted_and_scattered(x, v, counts, out):
    i = tk.parallel(x.shape[0], 4)
    counts.at[x[i]].add(1)
    out[jnp.argsort(x[i]) * 3 + i.index] = v[i]


@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 0)])
def test_a_batch_leaves_tails_out(axes: tuple[int | None, int | None]) -> None:
    x, v = np.stack([X, X[::-1], X // 2], axis=axes[0] or 0), np.arange(30).reshape(3, 10).astype(np.float32)
    x, v = (a if axis is not None else a[0] for a, axis in zip((x, v), axes, strict=True))
    found = jax.vmap(counted_and_scattered, axes)(x, v)
    for n in range(3):
        one = (a if axis is None else a.take(n, axis) for a, axis in zip((x, v), axes, strict=True))
        for got, expected in zip(found, interpreted(counted_and_scattered, *one), strict=True):
            np.testing.assert_array_equal(got[n], expected)


def test_a_batch_inside_of_a_kernel_leaves_tails_out() -> None:
    @kernel(((2, 12), np.int32))
    def looked_up(x, table, out):
        i = tk.parallel(12, 4)
        vectors = jax.vmap(lambda v: jnp.cumsum(v) // 4)(x[:, i])
        for n in range(2):
            out[n, i] = table.load(vectors[n], fill=-1)

    x, table = np.stack([X, X[::-1]]), np.arange(7, 13).astype(np.int32)
    expected = np.full((2, 12), -1, np.int32)
    for start in (0, 4, 8):
        places = np.cumsum(x[:, start : start + 4], axis=1) // 4
        expected[:, start : start + places.shape[1]] = table[places]
    check(looked_up, x, table, oracle=expected)


# --- in a part of a loop's range -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 9), (5, 6), (5, 5)])
def test_lanes_before_and_behind_a_range_address_nothing(start: int, stop: int) -> None:
    @tk.kernel(out_type=counts())
    def histogram(x, bounds, out):
        for first, last in ((start, stop), (bounds[0], bounds[1])):
            tk.foreach(tk.serial(x.shape[0], 4, start=first, stop=last), lambda k: out.at[x[k]].add(1))

    expected = 2 * np.bincount(X[start:stop], minlength=6).astype(np.int32)
    check(histogram, X, np.array([start, stop], np.int32), oracle=expected)
