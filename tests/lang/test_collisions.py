"""Programs that touch elements of each other at places that the grid alone decides: refused while tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import WIDE, check, kernel, like_first, numbers, refused
from tilekern.errors import OrderDependenceError, OutputError, TilekernError, WriteConflictError
from tilekern.ir.interpret import interpret

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


# --- loads of what another program stores ----------------------------------------------------------------------------

in_place = tk.kernel(out_type=lambda d: (), donate=("d",))


def a_shift(d):
    i = tk.parallel(d.shape[0], 4)
    d[i] = d[i - 1]


def a_reversal(d):
    i = tk.parallel(d.shape[0], 4)
    d[i] = d[d.shape[0] - 1 - i.indices]


def a_maximum_of_all(d):
    i = tk.parallel(d.shape[0], 4)
    d[i] = d[i] - d[...].max()


@pytest.mark.parametrize("body", [a_shift, a_reversal, a_maximum_of_all])
def test_a_donated_array_that_programs_change_for_each_other(body) -> None:
    with pytest.raises(OrderDependenceError, match=r"a program loads d\[\d+\], which another program stores") as raised:
        in_place(body)(X)
    assert raised.value.loc.function == body.__name__
    assert "an output of its own" in raised.value.fix


def test_a_total_in_an_array_that_starts_at_0() -> None:
    @tk.kernel(out_type=lambda x: tk.Zeros(jax.ShapeDtypeStruct((1,), x.dtype)))
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[0] = out[0] + x[i].sum()

    with pytest.raises(OutputError, match="4 programs store the same elements of out"):
        f.trace(X)


def test_a_total_in_a_donated_array() -> None:
    @tk.kernel(out_type=lambda x, total: (), donate=("total",))
    def f(x, total):
        i = tk.parallel(x.shape[0], 4)
        total[0] = total[0] + x[i].sum()

    with pytest.raises(OutputError, match="4 programs store the same elements of total"):
        f.trace(X, X[:1])


def test_what_a_program_stored_and_what_no_program_stores() -> None:
    @in_place
    def f(d):
        i = tk.parallel(6, 2)
        d[i] = d[i] * 2 + d[i + 7]
        d[i] = d[i] + 1

    check(f, X, oracle=np.concatenate([X[:6] * 2 + X[7:] + 1, X[6:]]))


def test_a_load_for_its_shape_alone() -> None:
    @in_place
    def f(d):
        i = tk.parallel(d.shape[0], 4)
        d[i] = jnp.ones_like(d[i + 1])

    check(f, X, oracle=np.ones(13, np.float32))


PLACES = [
    lambda i, j: i,
    lambda i, j: i + 4,
    lambda i, j: i - 3,
    lambda i, j: tk.ds(j * 5, 3),
    lambda i, j: slice(None),
    lambda i, j: slice(2, 4),
    lambda i, j: j,
    lambda i, j: (i.indices * 3) % 11,
    lambda i, j: 12 - i.indices,
]
PLACE = st.sampled_from(PLACES)
MASK = st.sampled_from([None, lambda i, j: j == 0, lambda i, j: i.index == 1])


@WIDE
@given(st.lists(PLACE, max_size=2), st.lists(st.tuples(PLACE, MASK), min_size=1, max_size=2), st.integers(1, 13))
def test_a_refused_kernel_is_wrong_in_the_interpreter(loads, stores, block) -> None:
    def body(d):
        i, j = tk.parallel(d.shape[0], block), tk.parallel(2)
        total = sum((d[place(i, j)].sum() for place in loads), jnp.float32(0))
        for place, mask in stores:
            d.store(place(i, j), total, mask=None if mask is None else mask(i, j))

    try:
        in_place(body).trace(X)
    except TilekernError as error:
        assert isinstance(error, (OrderDependenceError, OutputError))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("check_coverage", "check_collisions"):
                patch.setattr(f"tilekern.lang.trace.{name}", lambda func: None)
            func = in_place(body).trace(X).ir
        with pytest.raises((OrderDependenceError, WriteConflictError)):
            interpret(func, X)
