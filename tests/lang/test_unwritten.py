"""Loads of plain outputs before any store: they are refused while tracing, and no correct program is refused."""

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
from tests.lang.checks import WIDE, check, kernel, like_first, numbers, refused
from tilekern.errors import OutputError, TilekernError, UnwrittenError

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(8)
REFUSED = "out is loaded before anything is stored to it"


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_output_is_added_to() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] += x[i]  # <-

    with refused(OutputError, REFUSED, expected="no value at first", got="a load of out", fix="donate="):
        f.trace(X)


@pytest.mark.parametrize("remedy", ["donate=", "tk.Zeros", "tk.Sum", "carry"])
def test_the_error_names_the_remedies(remedy: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...] + out[...]  # <-

    with refused(OutputError, REFUSED, fix=remedy):
        f.trace(X)


def add_in_a_loop(x, out):
    i = tk.parallel(x.shape[0], 4)

    def step(k):
        out[i] += x[i] * k

    tk.foreach(tk.serial(3), step)


def add_to_each_tile(x, out):
    def step(t):
        out[t] = out[t] + x[t]

    tk.foreach(tk.serial(x.shape[0], 4), step)


def load_under_a_condition(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = jax.lax.cond(x[0] > 0, lambda: out[i], lambda: x[i])


def load_through_a_view(x, out):
    i = tk.parallel(x.shape[0], 4)
    view = out.at[i]
    view[...] = jax.jit(lambda ref: ref[...])(view) + 1


def load_with_a_mask(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = out.load(i, mask=x[i] > 0)


def load_in_a_loop_that_stores_nothing(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = tk.fold(tk.serial(3), lambda k, c: c + out[i], tk.zeros(i))


def load_in_a_while(x, out):
    def step(n):
        out[...] = out[...] + 1
        return n + 1

    jax.lax.while_loop(lambda n: n < 3, step, 0)


def load_in_an_inner_loop(x, out):
    def outer(k):
        total = tk.fold(tk.serial(2), lambda n, c: c + out[...], jnp.zeros(8))
        out[...] = total + k

    tk.foreach(tk.serial(3), outer)


def load_what_a_later_branch_stores(x, out):
    value = out[...]

    @tk.when(x[0] > 0)
    def _():
        out[...] = value

    @tk.when(x[0] <= 0)
    def _():
        out[...] = x[...]


@pytest.mark.parametrize(
    "body",
    [
        add_in_a_loop,
        add_to_each_tile,
        load_under_a_condition,
        load_through_a_view,
        load_with_a_mask,
        load_in_a_loop_that_stores_nothing,
        load_in_a_while,
        load_in_an_inner_loop,
        load_what_a_later_branch_stores,
    ],
)
def test_what_is_refused(body: Callable[[Any, Any], None]) -> None:
    with pytest.raises(OutputError, match=REFUSED):
        like_first(body).trace(X)


# --- what is not -----------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def running(x, out):
    """The load before the first element is out of bounds, and reads 0."""

    def step(k):
        out[k] = out[k - 1] + x[k]

    tk.foreach(tk.serial(x.shape[0]), step)


@like_first
def later_iterations(x, out):
    i = tk.parallel(x.shape[0], 4)

    def step(k):
        before = jax.lax.cond(k > 0, lambda: out[i], lambda: tk.zeros(i))
        masked = out.load(i, mask=jnp.broadcast_to(k > 0, 4))
        out[i] = (before + masked) / 2 + x[i]

    tk.foreach(tk.serial(3), step)


@like_first
def a_branch_stored(x, out):
    @tk.when(x[0] > 0)
    def _():
        out[...] = x[...]

    @tk.when(x[0] <= 0)
    def _():
        out[...] = -x[...]

    out[...] = out[...] * 2


@like_first
def an_inner_loop_of_no_iteration_at_first(x, out):
    def outer(k):
        total = tk.fold(tk.serial(3, stop=k), lambda n, c: c + out[...], jnp.zeros(8))
        out[...] = total + x[...]

    tk.foreach(tk.serial(2), outer)


@like_first
def a_load_for_its_shape(x, out):
    out[...] = jnp.zeros_like(out[...]) + x[...]


@like_first
def nothing_in_bounds(x, out):
    def step(t):
        out[t] = x[t] + out.load(t - 8, fill=1)

    tk.foreach(tk.serial(8, 8), step)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (running, np.cumsum(X)),
        (later_iterations, 3 * X),
        (a_branch_stored, 2 * X),
        (an_inner_loop_of_no_iteration_at_first, 2 * X),
        (a_load_for_its_shape, X),
        (nothing_in_bounds, X + 1),
    ],
)
def test_right_programs_pass(function: tk.Kernel, expected: np.ndarray) -> None:
    check(function, X, oracle=expected)


@pytest.mark.parametrize("role", [tk.Zeros, None])
def test_outputs_that_start_with_a_value_are_loaded(role: Any) -> None:
    if role is None:

        @tk.kernel(out_type=lambda x, y: (), donate=("y",))
        def f(x, y):
            y[...] += x[...]

        check(f, X, 2 * X, oracle=3 * X)
        return

    @tk.kernel(out_type=lambda x: role(x))
    def g(x, out):
        out[...] += x[...]

    check(g, X, oracle=X)


def test_an_empty_output_is_added_to() -> None:
    @like_first
    def f(x, out):
        out[...] += x[...]

    check(f, numbers(0), oracle=numbers(0))


# --- random programs: what the check refuses, the interpreter finds wrong -------------------------------------------

STEP = st.deferred(
    lambda: (
        st.sampled_from(["load", "load before", "load masked", "store", "store half"])
        | st.tuples(st.sampled_from(["if", "loop", "loop from 1", "traced loop"]), st.lists(STEP, max_size=3))
    )
)


@WIDE
@given(st.lists(STEP, max_size=5))
def test_what_is_refused_the_interpreter_refuses(steps: Any) -> None:
    """Conditions hold for each k, which is at most 2, and traced loops have iterations: no refused code is dead."""

    @kernel(None, ((), np.float32))
    def f(x, out, total):
        def run(steps: Any, k: Any, carry: Any) -> Any:
            for step in steps:
                carry = one(step, k, carry)
            return carry

        def one(step: Any, k: Any, carry: Any) -> Any:
            match step:
                case "load":
                    return carry + out[...].sum()
                case "load before":
                    return carry + out[tk.ds(k - 1, 1)].sum()
                case "load masked":
                    return carry + out.load(..., mask=jnp.broadcast_to(k > 0, 4)).sum()
                case "store":
                    out[...] = x[...] + carry
                case "store half":
                    out[:2] = x[:2] + carry
                case "if", inner:
                    return jax.lax.cond(x[0] + 2 > k, lambda: run(inner, k, carry), lambda: carry)
                case "loop", inner:
                    return tk.fold(tk.serial(2), lambda n, c: run(inner, n, c), carry)
                case "loop from 1", inner:
                    return tk.fold(tk.serial(3, start=1), lambda n, c: run(inner, n, c), carry)
                case _, inner:
                    axis = tk.serial(3, stop=x[1].astype(jnp.int32))
                    return tk.fold(axis, lambda n, c: run(inner, n, c), carry)
            return carry

        total[()] = run(steps, jnp.int32(0), jnp.float32(0))
        out[...] = x[...]

    x = numbers(4)
    try:
        traced = f.trace(x)
    except OutputError as error:
        assert REFUSED in error.summary
        with pytest.raises(UnwrittenError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilekern.lang.trace.check_loads", lambda func: None)
            tk.interpret(f.trace(x))(x)
        return
    try:
        tk.interpret(traced)(x)
    except TilekernError as error:
        assert type(error) is UnwrittenError
