"""Elements that two programs store by index vectors, which the grid alone decides: refused while tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import check, kernel, like_first, numbers, refused
from tilekern.errors import OutputError

X = numbers(13)
TWICE = "2 programs store the same elements of out"


def test_lanes_behind_the_end_that_come_back_into_the_array() -> None:
    """Even elements first, then odd ones: of 13, lane 14 has place 7 of the first odd element."""

    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 8)
        out[i.indices // 2 + jnp.where(i.indices % 2 == 1, 7, 0)] = x[i]  # <-

    with refused(OutputError, TWICE, expected="behind the end", got="element [7]", fix="mask=i.valid"):
        f.trace(X)


def test_the_same_lanes_under_a_mask() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 8)
        out.store(i.indices // 2 + jnp.where(i.indices % 2 == 1, 7, 0), x[i], mask=i.valid)

    check(f, X, oracle=np.concatenate([X[::2], X[1::2]]))


def test_outputs_that_start_at_0_too() -> None:
    @tk.kernel(out_type=lambda x: tk.Zeros(jax.ShapeDtypeStruct((4, 13), x.dtype)))
    def f(x, out):
        i, j = tk.parallel(5), tk.parallel(x.shape[0], 4)
        out[jnp.arange(2) + i // 2, j] = x[j]

    with pytest.raises(OutputError, match=TWICE):
        f.trace(X)


def test_points_that_two_programs_have() -> None:
    @kernel(((13, 13), np.float32))
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[...] = jnp.zeros((13, 13))
        out[tk.points(i.indices % 6, i.indices % 6)] = x[i]

    with pytest.raises(OutputError, match="store the same elements of out"):
        f.trace(X)


def test_places_that_data_decide_are_not_refused() -> None:
    @kernel(None)
    def f(x, order, out):
        i = tk.parallel(x.shape[0], 8)
        out[(order[i] * 5) % 13] = x[i]

    order = np.arange(13, dtype=np.int32)
    check(f, X, order, oracle=X[(order * 8) % 13])


def test_a_place_of_each_program_in_a_large_grid() -> None:
    """More programs than are evaluated."""

    @kernel(((2000,), np.float32))
    def f(out):
        i = tk.parallel(2000)
        out[jnp.arange(1) + i] = 1.0

    f.trace()
