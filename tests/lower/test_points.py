"""Points, and transposed and reshaped views, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tilekern as tk
from tests.lower.test_index_vectors import Outputs, by_interpreter, by_llvm, by_mosaic, by_triton, by_xla
from tilekern.testing.programs.index_vectors import Chain

X = np.arange(6 * 20, dtype=np.float32).reshape(6, 20) - 7
ROWS = np.array([3, 1, 0, 5, 1, 1, 2, 0, 4, 5], np.int32)
COLUMNS = np.array([0, 19, 7, 20, 3, 3, -1, 7, 11, 0], np.int32)
INSIDE = (COLUMNS >= 0) & (COLUMNS < 20)


def out(*shape: int, dtype: Any = np.float32) -> Callable[[Callable[..., None]], tk.Kernel]:
    return tk.kernel(out_type=lambda *_: jax.ShapeDtypeStruct(shape, dtype))


def zeros(*shape: int, dtype: Any = np.float32) -> Callable[[Callable[..., None]], tk.Kernel]:
    return tk.kernel(out_type=lambda *_: tk.Zeros(jax.ShapeDtypeStruct(shape, dtype)))


# --- points ----------------------------------------------------------------------------------------------------------


def one_logit_a_row() -> Chain:
    @out(6)
    def kernel(x, labels, out):
        i = tk.parallel(6, 4)
        out[i] = x.load(tk.points(i, labels[i]), fill=-jnp.inf)

    labels = COLUMNS[:6]
    expected = np.where(INSIDE[:6], X[np.arange(6), labels.clip(0, 19)], -np.inf)
    return Chain(kernel, (X, labels), (expected,))


def take_along_axis() -> Chain:
    @out(6, 3)
    def kernel(x, columns, out):
        i = tk.parallel(6, 4)
        out[i] = x[tk.points(i.indices[:, None], columns[i])]

    columns = np.arange(18, dtype=np.int32).reshape(6, 3) * 7 % 20
    return Chain(kernel, (X, columns), (np.take_along_axis(X, columns, 1),))


def points_of_both_dims_anywhere() -> Chain:
    """A mask, a tail, and lanes outside of either dim."""

    @out(10)
    def kernel(x, rows, columns, out):
        i = tk.parallel(10, 4)
        out[i] = x.load(tk.points(rows[i], columns[i]), mask=i.indices != 4, fill=0.5)

    expected = np.where(INSIDE & (np.arange(10) != 4), X[ROWS, COLUMNS.clip(0, 19)], 0.5)
    return Chain(kernel, (X, ROWS, COLUMNS), (expected,))


def points_beside_whole_dims() -> Chain:
    @out(10, 4)
    def kernel(x, rows, columns, out):
        i = tk.parallel(10, 4)
        out[i] = x.reshape(6, 5, 4)[tk.points(rows[i], columns[i])]

    columns = np.arange(10, dtype=np.int32) * 3 % 5
    return Chain(kernel, (X, ROWS, columns), (X.reshape(6, 5, 4)[ROWS, columns],))


def points_in_the_last_two_of_three_dims() -> Chain:
    @out(2, 10)
    def kernel(x, rows, columns, out):
        i = tk.parallel(10, 4)
        out[:, i] = x.reshape(2, 3, 20).load((slice(None), tk.points(rows[i], columns[i])), fill=-1)

    y, inside = X.reshape(2, 3, 20), INSIDE & (ROWS < 3)
    expected = np.where(inside, y[:, ROWS.clip(0, 2), COLUMNS.clip(0, 19)], -1)
    return Chain(kernel, (X, ROWS, COLUMNS), (expected,))


def points_of_a_dim_beside_its_neighbours() -> Chain:
    """The dims that go together have another one between them, and one of them counts the lanes."""

    @out(4, 3)
    def kernel(x, which, out):
        i = tk.parallel(4, 4)
        turned = x.transpose(0, 2, 1)
        out[i] = turned[tk.points(which[i], i)]

    which = np.array([1, 0, 0, 1], np.int32)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return Chain(kernel, (x, which), (x.transpose(0, 2, 1)[which, np.arange(4)],))


def points_of_three_dims() -> Chain:
    @out(10)
    def kernel(x, rows, columns, out):
        i = tk.parallel(10, 8)
        out[i] = x.reshape(2, 3, 20).load(tk.points(rows[i] % 2, rows[i] // 2, columns[i]), fill=-1)

    expected = np.where(INSIDE, X.reshape(2, 3, 20)[ROWS % 2, ROWS // 2, COLUMNS.clip(0, 19)], -1)
    return Chain(kernel, (X, ROWS, COLUMNS), (expected,))


def numbers_that_are_chosen_as_they_are() -> Chain:
    """NaN beside a chosen number does not come in, and a chosen one does; -0 keeps its sign."""

    @out(4)
    def kernel(x, columns, out):
        i = tk.parallel(4, 4)
        out[i] = 1 / x[tk.points(i, columns[i])]

    x = np.full((4, 8), np.nan, np.float32)
    columns = np.array([3, 0, 7, 2], np.int32)
    x[np.arange(4), columns] = [-0.0, np.inf, 2, np.nan]
    return Chain(kernel, (x, columns), (np.array([-np.inf, 0, 0.5, np.nan], np.float32),))


def points_of(dtype: Any) -> Callable[[], Chain]:
    def make() -> Chain:
        @out(10, dtype=dtype)
        def kernel(x, rows, columns, out):
            i = tk.parallel(10, 8)
            out[i] = x[tk.points(rows[i], columns[i])]

        x = np.asarray(X % 5 > 2 if dtype == np.bool_ else X % 100).astype(dtype)
        expected = np.where(INSIDE, x[ROWS, COLUMNS.clip(0, 19)], np.zeros((), dtype))
        return Chain(kernel, (x, ROWS, COLUMNS), (expected,))

    make.__name__ = f"points_of_{np.dtype(dtype).name}"
    return make


def stored_points() -> Chain:
    @zeros(6, 20)
    def kernel(rows, columns, out):
        i = tk.parallel(10, 4)
        out.store(tk.points(rows[i], columns[i]), rows[i] + 2.0 * columns[i], mask=i.indices != 7)

    expected = np.zeros((6, 20), np.float32)
    kept = INSIDE & (np.arange(10) != 7)
    expected[ROWS[kept], COLUMNS[kept]] = (ROWS + 2.0 * COLUMNS)[kept]
    return Chain(kernel, (ROWS, COLUMNS), (expected,))


def counted_points() -> Chain:
    """Several points are given twice, in one tile and in two."""

    @zeros(6, 20, dtype=np.int32)
    def kernel(rows, columns, out):
        i = tk.parallel(10, 4)
        out.at[tk.points(rows[i], columns[i])].add(1)

    expected = np.zeros((6, 20), np.int32)
    np.add.at(expected, (ROWS[INSIDE], COLUMNS[INSIDE]), 1)
    return Chain(kernel, (ROWS, COLUMNS), (expected,))


def summed_points() -> Chain:
    @tk.kernel(out_type=lambda *_: tk.Sum(jax.ShapeDtypeStruct((20, 6), np.float32)))
    def kernel(rows, columns, out):
        i = tk.parallel(10, 8)
        out.T.at[tk.points(rows[i], columns[i])].add(0.5 + i.indices)

    expected = np.zeros((20, 6), np.float32)
    np.add.at(expected.T, (ROWS[INSIDE], COLUMNS[INSIDE]), 0.5 + np.arange(10)[INSIDE])
    return Chain(kernel, (ROWS, COLUMNS), (expected,))


def points_of_a_donated_array() -> Chain:
    @tk.kernel(out_type=lambda state, *_: None, donate=("state",))
    def kernel(state, columns, _):
        i = tk.parallel(6, 4)
        state[tk.points(i, columns[i])] = state[tk.points(i, columns[i])] + 100

    expected = X.copy()
    expected[np.arange(6)[INSIDE[:6]], COLUMNS[:6][INSIDE[:6]]] += 100
    return Chain(kernel, (X, COLUMNS[:6]), (expected,))


# --- moved views -----------------------------------------------------------------------------------------------------


def transposed_tiles() -> Chain:
    @out(20, 6)
    def kernel(x, out):
        i, j = tk.parallel(6, 4), tk.parallel(20, 8)
        out[j, i] = x.T[j, i] * 2

    return Chain(kernel, (X,), (2 * X.T,))


def stored_transposed() -> Chain:
    @out(20, 6)
    def kernel(x, out):
        i, j = tk.parallel(6, 4), tk.parallel(20, 8)
        out.T[i, j] = x[i, j] * 2

    return Chain(kernel, (X,), (2 * X.T,))


def a_dot_with_a_transposed_view() -> Chain:
    @out(6, 8)
    def kernel(x, out):
        i = tk.parallel(6, 8)
        out[i] = tk.dot(x[i, 0:16], x.T[0:16, tk.ds(0, 8)])

    whole = X % 4
    expected = np.zeros((6, 8), np.float32)
    expected[:, :6] = whole[:, :16] @ whole[:, :16].T
    return Chain(kernel, (whole,), (expected,))


def merged_dims() -> Chain:
    @out(2, 3, 20)
    def kernel(x, out):
        i = tk.parallel(6, 4)
        out.reshape(6, 20)[i] = x.reshape(6, 20)[i] + 1

    return Chain(kernel, (X.reshape(2, 3, 20),), (X.reshape(2, 3, 20) + 1,))


def split_dims() -> Chain:
    @out(5, 6, 4)
    def kernel(x, out):
        h, i = tk.parallel(5), tk.parallel(6, 4)
        out[h, i] = x.reshape(6, 5, 4).transpose(1, 0, 2)[h, i] + 1

    return Chain(kernel, (X,), (X.reshape(6, 5, 4).transpose(1, 0, 2) + 1,))


def one_array_in_two_shapes() -> Chain:
    @out(6)
    def kernel(x, out):
        i = tk.parallel(6, 4)
        out[i] = x[i].sum(axis=1) + x.reshape(3, 40)[i.start // 4].sum() + x.reshape(-1)[tk.ds(3, 4)].sum()

    row = np.array([X[:2].sum()] * 4 + [X[2:4].sum()] * 2, np.float32)
    return Chain(kernel, (X,), (X.sum(1) + row + X[0, 3:7].sum(),))


def a_donated_array_reshaped() -> Chain:
    @tk.kernel(out_type=lambda state: None, donate=("state",))
    def kernel(state, _):
        i = tk.parallel(12, 4)
        rows = state.reshape(12, 10)
        rows[i] = rows[i] * 2

    return Chain(kernel, (X,), (2 * X,))


def updates_of_a_reshaped_array() -> Chain:
    @zeros(6, 20, dtype=np.int32)
    def kernel(rows, out):
        i = tk.parallel(10, 4)
        out.reshape(120).at[rows[i] * 20].add(1)

    expected = np.zeros((6, 20), np.int32)
    np.add.at(expected, (ROWS, 0), 1)
    return Chain(kernel, (ROWS,), (expected,))


KERNELS = (
    one_logit_a_row,
    take_along_axis,
    points_of_both_dims_anywhere,
    points_beside_whole_dims,
    points_in_the_last_two_of_three_dims,
    points_of_a_dim_beside_its_neighbours,
    points_of_three_dims,
    numbers_that_are_chosen_as_they_are,
    *map(points_of, (np.bool_, np.int8, np.uint32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn)),
    stored_points,
    counted_points,
    summed_points,
    points_of_a_donated_array,
    transposed_tiles,
    stored_transposed,
    a_dot_with_a_transposed_view,
    merged_dims,
    split_dims,
    one_array_in_two_shapes,
    a_donated_array_reshaped,
    updates_of_a_reshaped_array,
)


@pytest.mark.parametrize("backend", [by_interpreter, by_xla, by_llvm, by_triton, by_mosaic], ids=lambda b: b.__name__)
def test_points_and_moved_views(backend: Callable[[Sequence[Chain]], Sequence[Outputs]]) -> None:
    chains = [make() for make in KERNELS]
    for make, found, known in zip(KERNELS, backend(chains), chains, strict=True):
        for got, expected in zip(found, known.expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"{make.__name__}:\n{known.func}")
