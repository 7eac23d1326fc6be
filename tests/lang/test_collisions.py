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

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

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


def _wrong_in_the_interpreter(body) -> None:
    """Assert that a kernel runs, if it is refused, into an error of the interpreter."""
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

    _wrong_in_the_interpreter(body)


# --- in loops and branches -------------------------------------------------------------------------------------------


def _iterations_that_read_neighbours(d):
    i = tk.parallel(d.shape[0], 4)

    def step(t):
        d[i] = d[i - 1] + d[i + 1]

    tk.foreach(tk.serial(3), step)


def _a_loop_up_to_the_program(d):
    i = tk.parallel(d.shape[0], 4)
    before = tk.fold(tk.serial(d.shape[0], 4, stop=i.start), lambda t, total: total + d[t].sum(), 0.0)
    d[i] = d[i] + before


def _a_branch_of_every_second_program(d):
    i = tk.parallel(d.shape[0], 4)
    d[i] = d[i] * 2

    @tk.when(i.index % 2 == 1)
    def _():
        d[i] = d[i - 4]


def _a_case_of_a_switch(d):
    i = tk.parallel(d.shape[0], 4)
    d[i] = jax.lax.switch(i.index % 3, [lambda: jnp.zeros(4), lambda: jnp.ones(4), lambda: d[i - 1]])


LOADING = [
    _iterations_that_read_neighbours,
    _a_loop_up_to_the_program,
    _a_branch_of_every_second_program,
    _a_case_of_a_switch,
]


@pytest.mark.parametrize("body", LOADING)
def test_loads_in_loops_and_branches_that_the_grid_decides(body) -> None:
    with pytest.raises(OrderDependenceError, match=r"a program loads d\[\d+\], which another program stores"):
        in_place(body)(X)


def test_a_walk_of_persistent_programs() -> None:
    """Three programs take every third tile; with steps of one tile they store the same tiles."""

    def walk(step):
        @like_first
        def f(x, out):
            p = tk.parallel(3)

            def tile(n):
                place = tk.tile(13, 2, n * step + p)
                out[place] = x[place]

            tk.foreach(tk.serial(3), tile)

        return f

    check(walk(3), X, oracle=X)
    with refused(OutputError, TWICE, got="element"):

        @like_first
        def f(x, out):
            p = tk.parallel(5)

            def tile(n):
                place = tk.tile(13, 2, n + p)
                out[place] = x[place]  # <-

            tk.foreach(tk.serial(3), tile)

        f.trace(X)


def test_tiles_of_neighbours_that_overlap() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(4)
        out[tk.ds(i * 3, 4)] = x[tk.ds(i * 3, 4)]  # <-

    with refused(OutputError, TWICE, got="element [3]"):
        f.trace(X)


def test_two_stores_of_which_each_keeps_apart() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i]
        out[i + 4] = x[i + 4]  # <-

    with refused(OutputError, TWICE, got="element [4]"):
        f.trace(X)


def test_an_element_of_a_program_that_another_one_stores_under_a_condition() -> None:
    def f(last):
        @like_first
        def f(x, out):
            i = tk.parallel(x.shape[0], 4)
            out[i] = x[i]

            @tk.when(i.index == 3 if last else x[i].sum() > 3)  # data may let no program store
            def _():
                out[12] = 0.0

        return f

    check(f(last=True), X, oracle=np.append(X[:12], np.float32(0)))
    f(last=False).trace(X)


def test_loops_whose_bounds_data_decide_are_not_refused() -> None:
    @in_place
    def f(d):
        i = tk.parallel(6, 2)
        stop = (d[12] * 0).astype(jnp.int32)
        d[i] = tk.fold(tk.serial(13, 2, stop=stop), lambda t, total: total + d[t], jnp.ones(2))

    check(f, X, oracle=np.append(np.ones(6, np.float32), X[6:]))


def test_long_loops_and_large_grids_are_evaluated_in_part() -> None:
    @kernel(((2000, 3000), np.float32))
    def f(out):
        i = tk.parallel(2000)

        def store(n):
            out[(i * 7) % 2000, n] = 1.0

        tk.foreach(tk.serial(3000), store)

    f.trace()


LOOPS = st.sampled_from([(0, 1), (0, 3), (2, 2), (1, 4)])
LOOPED = st.sampled_from(
    [
        lambda i, n: i,
        lambda i, n: n,
        lambda i, n: i * 2 + n,
        lambda i, n: n * 4 + i,
        lambda i, n: (i + n) % 13,
        lambda i, n: 12 - i - n,
    ]
)
WHEN = st.sampled_from([lambda i, n: True, lambda i, n: i == 1, lambda i, n: n > 1, lambda i, n: (i + n) % 2 == 0])


@WIDE
@given(
    LOOPS, st.lists(LOOPED, max_size=1), st.lists(st.tuples(LOOPED, WHEN), min_size=1, max_size=2), st.integers(1, 3)
)
def test_a_refused_loop_is_wrong_in_the_interpreter(bounds, loads, stores, programs) -> None:
    def body(d):
        i = tk.parallel(programs)

        def step(n):
            total = sum((d[place(i, n)] for place in loads), jnp.float32(1))
            for place, when in stores:

                @tk.when(jnp.asarray(when(i, n)))
                def _(place=place):
                    d[place(i, n)] = total

        tk.foreach(tk.serial(13, start=bounds[0], stop=bounds[1]), step)

    _wrong_in_the_interpreter(body)
