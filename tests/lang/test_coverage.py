"""Plain outputs with holes, or that two programs store: refused while tracing, and no correct kernel is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import WIDE, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import OutputError, UnwrittenError, WriteConflictError
from tilekern.ir.interpret import interpret

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(10)
LEFT_OUT, TWICE = "no program stores element", "programs store the same elements of out"


# --- what is refused -------------------------------------------------------------------------------------------------


def half_of_the_tiles(x, out):
    i = tk.parallel(x.shape[0] // 2, 4)
    out[i] = x[i]


def no_program(x, out):
    i = tk.parallel(0, 4)
    out[i] = x[i]


def the_first_element(x, out):
    out[0] = x[0]


def all_but_the_last_element(x, out):
    for n in range(x.shape[0] - 1):
        out[n] = x[n]


def a_hole_in_the_middle(x, out):
    out[:4] = x[:4]
    out[5:] = x[5:]


def a_loop_from_a_later_tile(x, out):
    tk.foreach(tk.serial(x.shape[0], 4, start=4), lambda t: out.store(t, x[t]))


def a_loop_without_tiles(x, out):
    tk.foreach(tk.serial(x.shape[0], 4, start=4, stop=4), lambda t: out.store(slice(None), x[...]))


def an_index_vector_below_the_end(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i.indices % 8] = x[i]


def under_a_mask(x, out):
    i = tk.parallel(x.shape[0] // 2, 4)
    out.store(i, x[i], mask=x[i] > 0)


@pytest.mark.parametrize(
    ("body", "element"),
    [
        (half_of_the_tiles, 8),
        (no_program, 0),
        (the_first_element, 1),
        (all_but_the_last_element, 9),
        (a_hole_in_the_middle, 4),
        (a_loop_from_a_later_tile, 0),
        (a_loop_without_tiles, 0),
        (an_index_vector_below_the_end, 8),
        (under_a_mask, 8),
    ],
)
def test_elements_that_no_program_stores(body: Callable[..., None], element: int) -> None:
    with pytest.raises(OutputError, match=rf"{LEFT_OUT} {element} of dim 0 of out") as raised:
        like_first(body)(X)
    assert raised.value.loc.function == body.__name__
    assert "tk.Zeros" in raised.value.fix


def test_a_row_that_no_program_stores() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((6, 10), x.dtype))
    def f(x, out):
        r, i = tk.grid((5, 1), (x.shape[0], 4))
        out[r, i] = x[i][None]

    with pytest.raises(OutputError, match=rf"{LEFT_OUT} 5 of dim 0 of out"):
        f(X)


def test_a_sum_that_each_program_stores() -> None:
    @kernel(((1,), np.float32))
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[0] = x[i].sum()  # <-

    with refused(OutputError, f"3 {TWICE}", expected="one program", got="the axis i, of 3 tiles", fix="tk.Sum"):
        f.trace(X)


def an_axis_that_no_index_has(x, out):
    i, _ = tk.parallel(x.shape[0], 4), tk.parallel(2)
    out[i] = x[i]


def a_value_of_each_program(x, out):
    i = tk.parallel(x.shape[0])
    out[...] = x[...] + i


def in_a_loop(x, out):
    i = tk.parallel(3)
    tk.foreach(tk.serial(x.shape[0], 4), lambda t: out.store(t, x[t] + i))


def at_a_place_of_data(x, out):
    i = tk.parallel(3)
    out[...] = x[...]
    out[tk.ds(jnp.clip(x[0].astype(jnp.int32), 0, 5), 2)] = x[:2] + i


@pytest.mark.parametrize("body", [an_axis_that_no_index_has, a_value_of_each_program, in_a_loop, at_a_place_of_data])
def test_elements_that_two_programs_store(body: Callable[..., None]) -> None:
    with pytest.raises(OutputError, match=TWICE):
        like_first(body)(X)


# --- what is not -----------------------------------------------------------------------------------------------------


def test_each_element_by_an_index_vector() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[9 - i.indices] = x[i]

    check(f, X, oracle=X[::-1])


def test_places_of_data_that_may_all_be_outside() -> None:
    @like_first
    def f(x, where, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i]
        out[where[:]] = jnp.zeros(2, x.dtype)
        out[tk.ds(jnp.clip(where[0], -2, 20), 2)] = jnp.zeros(2, x.dtype)

    check(f, X, np.full(2, -2, np.int32), oracle=X, run=interpreted)


def test_tiles_that_pass_the_end_of_their_axis() -> None:
    """A lane behind the extent of its axis is a lane of the array."""

    @like_first
    def f(x, out):
        i = tk.parallel(9, 5)
        out[i] = x[i]

    check(f, X, oracle=X)


def test_a_branch_that_one_program_takes() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(3)

        @tk.when(i == 1)
        def _():
            out[...] = x[...]

    check(f, X, oracle=X)


def test_a_mask_that_one_program_has() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(3)
        out.store(..., x[...], mask=i == 1)

    check(f, X, oracle=X)


def test_a_place_that_an_earlier_store_decides() -> None:
    @kernel(((3,), np.int32), None)
    def f(x, own, out):
        i = tk.parallel(3)
        own[i] = jnp.int32(i)
        out[tk.ds(own[i] * 4, 4)] = x[tk.ds(own[i] * 4, 4)]

    check(f, X, oracle=(np.arange(3, dtype=np.int32), X))


def test_outputs_of_other_kinds_may_stay_0() -> None:
    @tk.kernel(out_type=lambda x: (tk.Zeros(x), tk.Sum(x)))
    def f(x, zeros, sums):
        i = tk.parallel(5, 4)
        zeros[i] = x[i]
        sums.at[0].add(x[i].sum())

    f.trace(X)


def test_empty_outputs_need_no_program() -> None:
    check(like_first(half_of_the_tiles), X[:0], oracle=X[:0])


# --- a refusal is a proof --------------------------------------------------------------------------------------------

POSITIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda i, j, k: i,
    lambda i, j, k: j,
    lambda i, j, k: k,
    lambda i, j, k: i + 1,
    lambda i, j, k: tk.ds(i.start * 2, 3),
    lambda i, j, k: tk.ds(j.index + k.start, 4),
    lambda i, j, k: 5 - i.indices,
    lambda i, j, k: (i.indices * 3) % 7,
    lambda i, j, k: slice(None),
    lambda i, j, k: slice(1, 5),
    lambda i, j, k: jnp.minimum(i.start, 2),
]


def _refused_only_if_wrong(make: Callable[[], tk.Kernel]) -> None:
    """Trace a kernel; if this check refuses it, it must be wrong in the interpreter."""
    try:
        make().trace(X)
    except OutputError as error:
        assert LEFT_OUT in error.summary or TWICE in error.summary
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilekern.lang.trace.check_coverage", lambda func: None)
            patch.setattr("tilekern.lang.trace.check_collisions", lambda func: None)
            func = make().trace(X).ir
        with pytest.raises((UnwrittenError, WriteConflictError)):
            interpret(func, X)


VIEWS: list[Callable[[Any], Any]] = [
    lambda out: out,
    lambda out: out.T,
    lambda out: out.reshape(24),
    lambda out: out.reshape(2, 2, 6),
    lambda out: out.reshape(2, 2, 3, 2).transpose(2, 0, 1, 3),
    lambda out: out.at[1:],
]


@WIDE
@given(
    st.lists(st.sampled_from(VIEWS), min_size=1, max_size=2), st.integers(0, 24), st.integers(1, 8), st.integers(0, 9)
)
def test_a_kernel_that_is_refused_for_its_views_is_wrong(views, extent, block, wrap) -> None:
    """Stores to 4 x 6 elements through views that are moved, reshaped or cut; index vectors begin anew at `wrap`."""

    def body(x, out):
        i = tk.parallel(extent, block)
        for view in views:
            view(out)[i.indices % wrap if wrap else i] = 1.0

    _refused_only_if_wrong(lambda: kernel(((4, 6), np.float32))(body))


def test_a_store_through_a_reshaped_view() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((5, 2), x.dtype))
    def f(x, out):
        h, i = tk.parallel(2), tk.parallel(5, 2)
        out.reshape(5, 2, 1)[i, h] = x.reshape(5, 2, 1)[i, h]

    check(f, X, oracle=X.reshape(5, 2))


@WIDE
@given(st.data())
def test_a_refused_kernel_is_wrong_in_the_interpreter(data: st.DataObject) -> None:
    """Random stores at one or two places, in a loop, in a branch, under a mask: what is refused is wrong."""
    size, extents = data.draw(st.integers(1, 8)), data.draw(st.tuples(*[st.integers(0, 8)] * 3))
    blocks = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    stores = data.draw(
        st.lists(
            st.tuples(st.sampled_from(POSITIONS), st.sampled_from(["plain", "when", "mask"])), min_size=1, max_size=2
        )
    )
    start = data.draw(st.integers(0, 8))

    def body(x, out):
        i, j = tk.grid((extents[0], blocks[0]), (extents[1], blocks[1]))

        def step(k):
            for position, form in stores:
                place = position(i, j, k)
                if isinstance(place, slice) and size < 5 and place.start:
                    place = slice(None)
                mask = i.index == 0 if form == "mask" else None
                if form == "when":
                    tk.when(j.index == 0)(lambda place=place: out.store(place, 1.0))
                else:
                    out.store(place, 1.0, mask=mask)

        tk.foreach(tk.serial(extents[2], blocks[2], start=min(start, extents[2])), step)

    _refused_only_if_wrong(lambda: kernel(((size,), np.float32))(body))
