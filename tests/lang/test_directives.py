"""`when`, `hoist`, `debug_print` and `device_assert`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import ArgumentError, CarryError, DeviceAssertionError, TraceError
from tilekern.ir.control import Hoist
from tilekern.ir.core import Func

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(6)


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-1, 2, 9])
def test_a_body_runs_where_its_condition_holds(threshold: int) -> None:
    @tk.kernel(out_type=tk.Zeros)
    def f(x, out):
        i = tk.parallel(6)

        @tk.when(x[i] > threshold)
        def _():
            out[i] = x[i]

            @tk.when(i == 3)
            def _():
                out[i] = -x[i]

    check(f, X, oracle=np.where(threshold < X, X * np.array([1, 1, 1, -1, 1, 1], np.float32), 0))


@pytest.mark.parametrize("holds", [True, np.bool_(False), np.array(True)])
def test_a_condition_that_is_known(holds: Any) -> None:
    @tk.kernel(out_type=tk.Zeros)
    def f(x, out):
        @tk.when(holds)
        def _():
            out[...] = x[...]

    check(f, X, oracle=X if holds else np.zeros_like(X))


def test_one_body_in_several_traces() -> None:
    """JAX caches branches by the function's identity."""
    places: dict[str, Any] = {}

    def body() -> None:
        places["out"][0] = places["x"][0]

    @tk.kernel(out_type=tk.Zeros)
    def f(x, out):
        places.update(x=x, out=out)
        tk.when(x[0] > 0)(body)

    for x in (X, numbers(4, start=5)):
        check(f, x, oracle=np.where(np.arange(len(x)) == 0, x, 0))


@pytest.mark.parametrize(("condition", "got"), [(1, "1 (int)"), (None, "None (NoneType)"), (X[0], "float32[]")])
def test_a_condition_that_is_no_bool(condition: Any, got: str) -> None:
    @like_first
    def f(x, out):
        @tk.when(condition)  # <-
        def _(): ...

    with refused(ArgumentError, "the condition of tk.when must be bool", expected="a bool", got=got, fix="compare"):
        f.trace(X)


def test_a_condition_that_is_no_scalar() -> None:
    @like_first
    def f(x, out):
        tk.when(x[...] > 1)(lambda: None)  # <-

    with refused(
        ArgumentError, "must be a scalar", expected="a bool scalar", got="condition = bool[6]", fix=".any() or .all()"
    ):
        f.trace(X)


def test_a_body_that_returns_a_value() -> None:
    @like_first
    def f(x, out):
        tk.when(x[0] > 1)(lambda: x[0])  # <-

    with refused(
        CarryError, "the body of tk.when returned a value", expected="None", got="returned float32[]", fix="lax.cond"
    ):
        f.trace(X)


# --- hoist -----------------------------------------------------------------------------------------------------------


def hoists(function: tk.Kernel, *arrays: Any) -> int:
    """Number of hoisted values in the IR of the backends."""
    func: Func = function.trace(*arrays).ir
    return sum(isinstance(op, Hoist) for op in func.walk())


@pytest.mark.smoke
def test_loop_bounds_from_a_hoisted_search() -> None:
    """out[i] = Σ x[k] over segment i, whose bounds a fold inside of the hoist finds."""

    @tk.kernel(out_type=lambda x, segments, **_: jax.ShapeDtypeStruct((4,), x.dtype))
    def sums(x, segments, out):
        i = tk.parallel(4)

        def bounds():
            def count(k, carry):
                less, equal = carry
                ids = segments.load(k, fill=9)
                return less + (ids < i).sum(), equal + (ids == i).sum()

            start, length = tk.fold(tk.serial(segments.shape[0], 4), count, (jnp.int32(0), jnp.int32(0)))
            return {"start": start, "stop": start + length}

        span = tk.hoist(bounds)
        out[i] = tk.fold(tk.serial(x.shape[0], **span), lambda k, acc: acc + x[k], jnp.float32(0))

    segments = np.array([0, 0, 1, 3, 3, 3, 3], np.int32)
    x = numbers(7)
    check(sums, x, segments, oracle=np.bincount(segments, x, 4).astype(np.float32))
    assert hoists(sums, x, segments) == 1


def test_a_hoist_of_values_computed_before_and_inside_loops_that_do_not_matter() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        biggest = x[i].max()

        def step(k, acc):
            return acc + tk.hoist(lambda: biggest + x[0]) * k

        out[i] = x[i] + tk.fold(tk.serial(3), step, jnp.float32(0))

    check(f, X, oracle=X + 3 * (np.repeat(X[1::2], 2) + X[0]))
    assert hoists(f, X) == 1


def test_a_hoist_in_a_jitted_helper_serves_several_kernels() -> None:
    """The cached trace must not use the refs of the first kernel."""

    @jax.jit
    def doubled(rows: tk.Ref, i: jax.Array) -> jax.Array:
        return tk.hoist(lambda: rows[i] * 2)

    @like_first
    def first(x, out):
        i = tk.parallel(6)
        out[i] = doubled(x, i) + doubled(x, 5 - i)

    @like_first
    def second(x, y, out):
        i = tk.parallel(6)
        out[i] = doubled(y, i) - doubled(x, i)

    for _ in range(2):
        check(first, X, oracle=2 * X + 2 * X[::-1])
        check(second, X, 3 * X, oracle=4 * X)
    assert (hoists(first, X), hoists(second, X, X)) == (2, 2)


def test_one_function_hoisted_by_traces_of_different_shapes() -> None:
    @like_first
    def f(x, out, *, block: tk.Block = 2):
        i = tk.parallel(x.shape[0], block)
        out[i] = tk.hoist(lambda: x[i].sum()) + x[i]

    for length, block in ((6, 2), (4, 2), (6, 3), (6, 2)):
        x = numbers(length)
        check(f, x, oracle=lambda x, block: x + np.repeat(x.reshape(-1, block).sum(1), block), block=block)


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.grad(lambda v: jax.vmap(f)(v).sum()), jax.checkpoint])
def test_a_hoist_in_transformed_functions(transform: Any) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        out[i] = transform(lambda v: tk.hoist(lambda: v * 3))(x[i])

    derived = transform is not jax.vmap and transform is not jax.checkpoint
    check(f, X, oracle=np.full_like(X, 3) if derived else 3 * X)
    assert hoists(f, X) >= 1


HOISTABLE = "a hoisted value may depend on grid indices and inputs only"


def test_a_hoist_that_reads_an_output() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6)
        out[i] = x[i]
        out[i] = tk.hoist(lambda: out[i] + 1)  # <-

    with refused(
        TraceError,
        HOISTABLE,
        expected="loads of inputs",
        got="a load of out, which programs write",
        fix="without tk.hoist",
    ):
        f.trace(X)


@pytest.mark.parametrize("how", ["a value", "a fold"])
def test_a_hoist_of_what_was_read_from_an_output(how: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]
        total = out[0] if how == "a value" else tk.fold(tk.serial(6), lambda k, acc: acc + out[k], jnp.float32(0))
        out[...] = x[...] + tk.hoist(lambda: total * 2)  # <-

    with refused(TraceError, HOISTABLE, got="a load of out, which programs write"):
        f.trace(X)


def test_a_hoist_that_reads_a_donated_input() -> None:
    @tk.kernel(out_type=lambda x: (), donate=("x",))
    def f(x):
        i = tk.parallel(6)
        x[i] = tk.hoist(lambda: x[i])  # <-

    with refused(TraceError, HOISTABLE, got="a load of x, which programs write"):
        f.trace(X)


def test_a_hoist_that_stores() -> None:
    @like_first
    def f(x, out):
        def stores():
            out[...] = x[...]
            return x[0]

        out[...] = tk.hoist(stores) + x[...]  # <-

    with refused(TraceError, HOISTABLE, got="a store to out"):
        f.trace(X)


LOOPS: dict[str, Callable[[tk.Ref, Callable[[Any], Any]], Any]] = {
    "the tile": lambda x, hoisted: tk.fold(tk.serial(6), lambda k, acc: acc + hoisted(lambda: x[k]), jnp.float32(0)),
    "the tile itself": lambda x, hoisted: tk.fold(tk.serial(6), lambda k, acc: acc + hoisted(lambda: k), 0),
    "the carry": lambda x, hoisted: tk.fold(tk.serial(6), lambda k, acc: hoisted(lambda: acc + x[0]), jnp.float32(0)),
    "a fori_loop": lambda x, hoisted: lax.fori_loop(0, 6, lambda k, acc: acc + hoisted(lambda: x[k]), jnp.float32(0)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_hoist_inside_a_loop_that_depends_on_it(name: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...] + LOOPS[name](x, lambda value: tk.hoist(value))  # <-

    with pytest.raises(TraceError, match=HOISTABLE) as caught:
        f.trace(X)
    assert caught.value.got == "a value of a loop around it"
    assert "tk.hoist" in caught.value.loc.snippet() and caught.value.loc.function == "<lambda>"


@pytest.mark.parametrize(("returned", "got"), [("a", "'a' (str)"), (None, "")])
def test_a_hoist_of_no_tile(returned: Any, got: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]
        tk.hoist(lambda: returned or x)  # <-

    with refused(
        TraceError,
        "the function of tk.hoist returned something that is no tile",
        expected="a pytree",
        got=got,
        fix="ref",
    ):
        f.trace(X)


def test_a_grid_axis_declared_in_a_hoist() -> None:
    @like_first
    def f(x, out):
        out[...] = tk.hoist(lambda: x[tk.parallel(6)])  # <-

    with refused(TraceError, "tk.parallel is called inside a loop", expected="at the top", got="tk.parallel(6, None)"):
        f.trace(X)


# --- debug_print -----------------------------------------------------------------------------------------------------


def printed(function: tk.Kernel, capfd: pytest.CaptureFixture[str], *arrays: Any) -> set[str]:
    """Lines that the interpreter prints; the compiled program must print the same."""
    found: list[set[str]] = []
    for run in (interpreted, lambda f, *xs: jax.block_until_ready(jax.jit(f)(*xs))):
        capfd.readouterr()
        run(function, *arrays)
        jax.effects_barrier()
        found.append(set(capfd.readouterr().out.splitlines()))
    assert found[0] == found[1]
    return found[0]


def test_every_program_prints(capfd: pytest.CaptureFixture[str]) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        tk.debug_print("tile {}: {:.1f} of {}", i.index, x[i].sum(), x[i] > 2)
        out[i] = x[i]

    assert printed(f, capfd, X) == {
        "tile 0: 3.0 of [False False]",
        "tile 1: 7.0 of [ True  True]",
        "tile 2: 11.0 of [ True  True]",
    }


def test_prints_in_loops_branches_and_views_of_several_dtypes(capfd: pytest.CaptureFixture[str]) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(2)

        def step(k):
            @tk.when(k == 1)
            def _():
                tk.debug_print("{} {} {} plain", i, k, x[k].astype(jnp.int8))

        tk.foreach(tk.serial(3), step)
        tk.debug_print("end")
        out[tk.ds(3 * i, 3)] = x[tk.ds(3 * i, 3)]

    assert printed(f, capfd, X) == {"0 1 2 plain", "1 1 2 plain", "end"}


@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap"])
def test_prints_in_transformed_functions(transform: str, capfd: pytest.CaptureFixture[str]) -> None:
    @like_first
    def f(x, out):
        def square(v):
            tk.debug_print("{}", v)
            tk.device_assert(v < 100, "too large")
            return v * v

        tile = x[...]
        if transform == "vjp":
            out[...] = jax.vjp(square, tile)[1](tile)[0]
        elif transform == "jvp":
            out[...] = jax.jvp(square, (tile,), (tile,))[1]
        else:
            out[...] = jax.vmap(square)(tile) * 2

    assert printed(f, capfd, X) == {str(X)}
    check(f, X, oracle=2 * X * X)
    with pytest.raises(DeviceAssertionError, match="too large"):
        interpreted(f, X + 95)


@pytest.mark.parametrize("lost", ["print", "check"])
def test_what_jax_drops_is_not_lost_silently(lost: str) -> None:
    @like_first
    def f(x, out):
        def looped(v):
            def body(_, carry):
                tk.debug_print("{}", x[0]) if lost == "print" else tk.device_assert(x[0] < 9)  # <-
                return carry * v

            return lax.fori_loop(0, 2, body, v)

        out[...] = jax.vjp(looped, x[...])[1](x[...])[0]

    with refused(
        TraceError,
        f"a {lost} was lost: JAX dropped it",
        expected=f"{lost}s outside",
        got=lost,
        fix=f"{lost} it afterwards",
    ):
        f.trace(X)


@pytest.mark.parametrize("format", ["{} {}", "{name}", "{:d}", "{", "{:.2f"])
def test_a_format_that_does_not_fit(format: str) -> None:
    @like_first
    def f(x, out):
        tk.debug_print(format, x[0])  # <-

    with refused(
        ArgumentError,
        "the format of tk.debug_print does not fit its values",
        expected="one field",
        got=format,
        fix="{}",
    ):
        f.trace(X)


@pytest.mark.parametrize("value", ["text", None])
def test_a_value_that_cannot_be_printed(value: Any) -> None:
    @like_first
    def f(x, out):
        tk.debug_print("{}", value)  # <-

    with refused(ArgumentError, "tk.debug_print prints tiles", expected="numbers", got=f"{value!r} (", fix="format"):
        f.trace(X)


# --- device_assert ---------------------------------------------------------------------------------------------------


@like_first
def checked(x, out):
    i = tk.parallel(x.shape[0], 4)
    tk.device_assert((x[i] < 10) | ~i.valid, "an element is too large")
    out[i] = x[i]


def test_an_assertion_that_holds() -> None:
    check(checked, X, oracle=X)


def test_an_assertion_that_does_not_hold_in_the_interpreter() -> None:
    with pytest.raises(DeviceAssertionError, match="an element is too large") as caught:
        interpreted(checked, X + 5)
    assert 'tk.device_assert((x[i] < 10) | ~i.valid, "an element is too large")' in caught.value.loc.snippet()


CALLS: dict[str, Callable[[Any], Any]] = {
    "alone": checked,
    "in jit": lambda x: jax.jit(checked)(x),
    "in a program": lambda x: jax.jit(lambda x: checked(x) * 2)(x),
    "in vmap": lambda x: jax.vmap(checked)(np.stack([X, x])),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_assertion_that_does_not_hold_in_a_compiled_program(name: str) -> None:
    with pytest.raises(Exception, match="an element is too large"):
        jax.block_until_ready(CALLS[name](X + 5))
        jax.effects_barrier()


def test_an_assertion_without_a_message() -> None:
    @kernel(((), np.float32))
    def f(x, out):
        tk.device_assert(x[...] > 1)
        out[...] = 0

    with pytest.raises(DeviceAssertionError, match="the assertion does not hold"):
        interpreted(f, X)


@pytest.mark.parametrize(
    ("condition", "got"), [(None, "None"), (0, "0 (int)"), (np.ones(2, ml_dtypes.bfloat16), "bfloat16[2]")]
)
def test_an_assertion_of_no_bool(condition: Any, got: str) -> None:
    @like_first
    def f(x, out):
        tk.device_assert(condition)  # <-

    with refused(ArgumentError, "the condition of tk.device_assert must be bool", expected="a bool", got=got, fix="!="):
        f.trace(X)


@pytest.mark.parametrize("name", ["when", "hoist", "region", "debug_print", "device_assert"])
def test_a_directive_outside_of_a_kernel(name: str) -> None:
    with refused(
        TraceError, f"tk.{name} is used outside a kernel", expected="@tilekern.kernel", got="no kernel", fix="body"
    ):
        getattr(tk, name)("" if name == "debug_print" else True)  # <-
