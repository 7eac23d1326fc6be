"""Index vectors with lanes from outside of an array, which address nothing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
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
