"""Import of jaxprs: control flow, nested functions, captured arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.lang.checks import COMPILED, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import TileScopeError, TraceError, UnsupportedError
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Func
from tilekern.lang.importer import CONSTANT_BYTES

X = numbers(10)


def ops(func: Func, kind: type) -> list[Any]:
    return [op for op in func.walk() if isinstance(op, kind)]


# --- control flow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 4])
def test_cond_by_program(block: int | None) -> None:
    """Different programs take different branches; a branch may store."""

    @kernel(((10,), np.float32), ((10,), np.int32))
    def f(x, out, taken):
        i = tk.parallel(10, block)

        def double(v):
            taken[i] = jnp.full(jnp.shape(v), 2, jnp.int32)
            return v * 2

        def negate(v):
            taken[i] = jnp.full(jnp.shape(v), 1, jnp.int32)
            return -v

        out[i] = lax.cond(jnp.max(x[i]) > 6, double, negate, x[i])

    large = (6 if block is None else 4) < X
    check(f, X, oracle=(np.where(large, X * 2, -X), np.where(large, 2, 1).astype(np.int32)))


@pytest.mark.parametrize("chosen", [-5, 0, 1, 2, 9])
def test_switch_clamps_its_index(chosen: int) -> None:
    @like_first
    def f(x, which, out):
        out[...] = lax.switch(which[()], [lambda v: v, lambda v: v * 10, lambda v: -v], x[...])

    check(f, X, np.int32(chosen), oracle=X * [1, 10, -1][min(max(chosen, 0), 2)])


def test_a_switch_by_a_static_index_keeps_one_branch() -> None:
    @like_first
    def f(x, out):
        out[...] = lax.switch(1, [lambda v: v, lambda v: v * 10, lambda v: -v], x[...])

    check(f, X, oracle=X * 10)
    assert not ops(f.trace(X).ir, Switch)


@COMPILED
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_a_while_of_every_program(starts: list[int]) -> None:
    """Lengths of Collatz sequences: each program has its own number of iterations."""

    def length(n: int) -> int:
        return 0 if n == 1 else 1 + length(n // 2 if n % 2 == 0 else 3 * n + 1)

    check(collatz, np.int32(starts), oracle=np.int32([length(n) for n in starts]))


@like_first
def collatz(x, out):
    i = tk.parallel(x.shape[0])

    def step(carry):
        n, count = carry
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    out[i] = lax.while_loop(lambda c: c[0] != 1, step, (x[i], 0))[1]


@pytest.mark.smoke
def test_a_while_loads_and_stores() -> None:
    """A loop copies elements up to a marker; its condition loads from the ref."""

    @like_first
    def f(x, out):
        out[...] = 0

        def step(n):
            out[n] = x[n]
            return n + 1

        lax.while_loop(lambda n: x[n] != 6, step, jnp.int32(0))

    check(f, X, oracle=np.where(X < 6, X, 0))


@pytest.mark.parametrize("stop", [0, 3])
def test_fori_loops(stop: int) -> None:
    @like_first
    def f(x, out):
        static = lax.fori_loop(0, stop, lambda n, c: c * 2 + x[n], x[...])
        out[...] = lax.fori_loop(0, x[stop - 1].astype(int), lambda n, c: c + n, static)

    expected = X
    for n in range(stop):
        expected = expected * 2 + X[n]
    check(f, X, oracle=expected + (3 if stop else 45))
    assert len(ops(f.trace(X).ir, Fold)) == (stop > 0)
    assert len(ops(f.trace(X).ir, While)) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_only_carries(reverse: bool) -> None:
    @like_first
    def f(x, out):
        out[...] = lax.scan(lambda c, _: (c * 2 + x[0], None), x[...], None, length=3, reverse=reverse)[0]

    check(f, X, oracle=X * 8 + 7)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_slices(reverse: bool) -> None:
    @kernel(((), np.float32), None)
    def f(x, last, out):
        last[...], out[...] = lax.scan(lambda c, v: (c * 2 + v, c), 1.0, x[...], reverse=reverse)

    def oracle(x: np.ndarray) -> Any:
        carry, out = np.float32(1), np.zeros(10, np.float32)
        for n in reversed(range(10)) if reverse else range(10):
            carry, out[n] = carry * 2 + x[n], carry
        return carry, out

    check(f, X, oracle=oracle)


def test_map_over_the_elements_of_a_tile() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)
        out[i] = lax.map(lambda v: v * 2 + x[0], x[i])

    check(f, X, oracle=X * 2 + 1)


def test_refs_pass_through_control_flow() -> None:
    """A ref may be an argument of any function that JAX traces, and a carry that does not change."""

    @like_first
    def f(x, out):
        total = jax.jit(lambda ref, n: ref[n] + ref[n + 1])(x, 3)
        total += lax.cond(total > 0, lambda ref: ref[0], lambda ref: ref[1], x)
        _, total = lax.fori_loop(0, 2, lambda n, c: (c[0], c[1] + c[0][n]), (x, total))
        _, total = tk.fold(tk.serial(2), lambda n, c: (c[0], c[1] + c[0][n]), (x, total))
        out[...] = x[...] + total

    check(f, X, oracle=X + (4 + 5) + 1 + 2 * (1 + 2))


# --- nested functions -----------------------------------------------------------------------------------------------


def test_nested_functions_are_inlined() -> None:
    @jax.jit
    def inner(v):
        return jax.jit(jnp.square)(v) + 1

    @like_first
    def f(x, out):
        out[...] = jax.named_call(inner, name="inner")(jax.checkpoint(lambda v: v * 2)(x[...]))

    check(f, X, oracle=X * X * 4 + 1)


def test_stores_inside_of_nested_functions() -> None:
    @like_first
    def f(x, out):
        @jax.jit
        def low(v):
            out[:5] = v

        def high(v):
            out[5:] = v

        low(x[:5])
        jax.checkpoint(high)(-x[5:])

    check(f, X, oracle=np.concatenate([X[:5], -X[5:]]))


def test_a_helper_that_jax_had_traced_before() -> None:
    """JAX keeps the trace of a jitted function of the module; tiles and refs reach it as arguments."""

    @like_first
    def f(x, out, *, scale: int):
        i = tk.parallel(10, 4)
        out[i] = _helper(x, i.indices) * scale

    for scale in (1, 2):
        check(f, X, oracle=lambda x, scale: x * scale, scale=scale)


@jax.jit
def _helper(ref: tk.Ref, indices: jax.Array) -> jax.Array:
    return ref[indices]


def test_custom_derivatives_are_functions() -> None:
    @like_first
    def f(x, out):
        out[...] = _cube(x[...]) + _square(x[...])

    check(f, X, oracle=X**3 + X**2)


@jax.custom_jvp
def _square(x):
    return x * x


_square.defjvp(lambda primals, tangents: (primals[0] ** 2, 100 * primals[0] * tangents[0]))


@jax.custom_vjp
def _cube(x):
    return x * x * x


_cube.defvjp(lambda x: (x**3, x), lambda x, g: (10 * x * g,))


def test_the_default_of_a_platform_dependent_function_and_barriers() -> None:
    @kernel(((4,), np.float32), None)
    def f(x, diagonal, out):
        diagonal[...] = jnp.diag(x[...])  # a product with a mask on TPUs, which NaN outside of the diagonal would spoil
        doubled = lax.platform_dependent(x[...], cpu=lambda x: x + 1, default=lambda x: 2 * x)
        out[...] = lax.optimization_barrier(doubled)

    x = numbers(4, 4)
    x[0, 3] = np.nan
    check(f, x, oracle=(np.diag(x), 2 * x))


def test_a_function_of_some_platforms() -> None:
    @like_first
    def f(x, out):
        out[...] = lax.platform_dependent(x[...], cpu=lambda x: x, tpu=lambda x: x)  # <-

    with refused(
        UnsupportedError, "one program for all platforms", expected="a default", got="cpu, tpu alone", fix="default="
    ):
        f.trace(X)


# --- captured arrays ------------------------------------------------------------------------------------------------

SMALL = np.float32([3, 5])
LARGE = numbers(CONSTANT_BYTES)


def test_small_arrays_become_constants() -> None:
    @like_first
    def f(x, out):
        out[...] = x[...] * SMALL[0] + jnp.asarray(SMALL)[1] + jnp.asarray(LARGE[:10])

    check(f, X, oracle=X * 3 + 5 + LARGE[:10])
    assert len(f.trace(X).ir.inputs) == 1


def test_large_arrays_become_operands_once() -> None:
    table = jnp.asarray(LARGE)

    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)
        out[i] = x[i] + jnp.sum(table) - jnp.max(table)

    check(f, X, oracle=X + np.float32(float(LARGE.sum(dtype=np.float64)) - LARGE.max()))
    assert [p.name for p in f.trace(X).ir.inputs] == ["x", "captured0"]


@pytest.mark.smoke
@pytest.mark.parametrize("size", [3, CONSTANT_BYTES])
def test_values_that_the_enclosing_jit_traces(size: int) -> None:
    """Values traced by an enclosing jit are further operands, new ones for each call."""

    @jax.jit
    def outer(x, table):
        @like_first
        def f(x, out):
            i = tk.parallel(10, 4)
            out[i] = x[i] * table[1] + jnp.max(table)

        return f(x)

    for scale in (1, 2):
        table = numbers(size) * scale
        np.testing.assert_array_equal(outer(X, table), X * table[1] + table.max())


def test_a_kernel_of_the_module_sees_the_values_of_this_call() -> None:
    for n in (1, 2, 3):
        held, rest = jnp.float32(n), numbers(n)  # other shapes: the enclosing functions are traced anew
        np.testing.assert_array_equal(_hold(X, held, rest), X * n)
        np.testing.assert_array_equal(jax.jit(lambda x, h: _hold(x, h, 0.0) - _hold(x, h + 1, 0.0))(X, held), -X)


_held: Any = None


@like_first
def scaled_by_held(x, out):
    out[...] = x[...] * _held


@jax.jit
def _hold(x, held, rest):
    global _held
    _held = held
    return scaled_by_held(x) + 0 * jnp.sum(rest)


def test_a_captured_array_of_a_dtype_that_does_not_exist() -> None:
    table = jnp.zeros(3, jnp.complex64)

    @like_first
    def f(x, out):
        out[...] = x[...] + jnp.abs(table)[0]  # <-

    with refused(
        UnsupportedError,
        "an array of this dtype",
        expected="float, integer or bool",
        got="complex64",
        fix="two real arrays",
    ):
        f.trace(X)


def test_a_captured_key() -> None:
    key = jax.random.key(0)

    @like_first
    def f(x, out):
        out[...] = x[...] + jax.random.uniform(key)  # <-

    with refused(UnsupportedError, "an array of this dtype", got="dtype = key<fry>", fix="jax.random.key_data"):
        f.trace(X)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_loop_body_of_the_module_that_kept_a_ref() -> None:
    """JAX returns the body's first trace, whose ref belongs to another call: an error, not the wrong array."""

    @kernel(None)
    def f(x, y, out, *, which: int):
        global _kept
        _kept = (x, y)[which]
        out[...] = lax.fori_loop(0, 3, _add_kept, x[...])  # <-

    check(f, X, -X, oracle=X + 3 * X[0], run=interpreted, which=0)
    with refused(
        TileScopeError,
        "a traced value is used outside the loop, the function or the trace that made it",
        expected="refs of the body that is being traced",
        got="a function that JAX had traced before",
        fix="pass refs as arguments",
    ):
        f.trace(X, -X, which=1)


_kept: Any = None


def _add_kept(n, carry):
    return carry + _kept[0]


def test_a_kernel_inside_of_a_kernel_that_uses_the_ref_outside() -> None:
    @like_first
    def f(x, out):
        @like_first
        def inner(tile, result):
            result[...] = tile[...] + x[...]  # <-

        out[...] = inner(x[...])

    with refused(
        TraceError, "a function kept a ref of another trace", expected="this trace", got="load", fix="argument"
    ):
        f.trace(X)


def test_a_value_of_a_loop_that_has_ended() -> None:
    @like_first
    def f(x, out):
        kept: list[jax.Array] = []

        def step(n, carry):
            kept.append(x[n])
            return carry

        tk.fold(tk.serial(3), step, 0.0)
        out[...] = x[...] + kept[0]  # <-

    for call in (f.trace, jax.jit(f)):
        with refused(TileScopeError, "a traced value is used outside the loop", got="has ended", fix="as carries"):
            call(X)
