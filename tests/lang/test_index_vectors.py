"""Index vectors with lanes from outside of an array, which address nothing."""

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
from tests.programs.index_vectors import chain

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


# --- chains of ops, against a model that looks at one lane at a time ----------------------------------------------


@given(st.data())
@WIDE
def test_what_comes_from_outside_addresses_nothing(data: st.DataObject) -> None:
    found = chain(lambda most: data.draw(st.integers(0, most)))
    for got, expected in zip(interpreted(found.kernel, *found.arrays), found.expected, strict=True):
        np.testing.assert_array_equal(got, expected)


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
