"""JAX's transformations inside of a body: derivatives and vmap, and the cases that are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import check, kernel, like_first, numbers, refused
from tilekern.errors import NotBatchableError, NotDifferentiableError, TraceError, UnsupportedError

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(10)


# --- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_gradient_of_a_function_of_tiles() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)
        out[i] = jax.grad(lambda v: jnp.sum(v**3 + x[0] * v))(x[i])

    check(f, X, oracle=3 * X**2 + X[0])


def test_vjp_and_jvp_of_a_function_of_tiles() -> None:
    @kernel(None, None, None)
    def f(x, value, pulled, pushed):
        i = tk.parallel(10, 4)
        value[i], pull = jax.vjp(lambda v: v * v * 3, x[i])
        (pulled[i],) = pull(tk.full(i, 2))
        pushed[i] = jax.jvp(lambda v: v * v * 3, (x[i],), (tk.full(i, 5),))[1]

    check(f, X, oracle=(X * X * 3, X * 12, X * 30))


def test_second_derivatives_and_linearize() -> None:
    @kernel(None, None)
    def f(x, second, linear):
        i = tk.parallel(10, 4)
        second[i] = jax.grad(lambda v: jax.grad(lambda u: jnp.sum(u**3))(v).sum())(x[i])
        linear[i] = jax.linearize(lambda v: v * v, x[i])[1](tk.full(i, 1))

    check(f, X, oracle=(6 * X, 2 * X))


def test_the_gradient_of_what_branches() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10)
        out[i] = jax.grad(lambda v: lax.cond(v > 4, lambda u: u * u, lambda u: -u, v))(x[i])

    check(f, X, oracle=np.where(X > 4, 2 * X, -1))


def test_the_gradient_of_a_function_with_a_rule() -> None:
    @like_first
    def f(x, out):
        out[...] = jax.grad(lambda v: jnp.sum(_doubled(v)))(x[...])

    check(f, X, oracle=np.full(10, 7, np.float32))


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (7 * g,))


def test_the_derivative_of_a_fold_forwards() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)

        def power(v):
            return tk.fold(tk.serial(2), lambda n, c: c * v, v)

        out[i] = jax.jvp(power, (x[i],), (tk.full(i, 1),))[1]

    check(f, X, oracle=3 * X**2)


def test_the_gradient_of_a_fori_loop() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)
        out[i] = jax.grad(lambda v: lax.fori_loop(0, 2, lambda n, c: c * v, v).sum())(x[i])

    check(f, X, oracle=3 * X**2)


def test_the_gradient_of_a_load_is_none_of_its_index() -> None:
    """A loaded value is a constant for differentiation."""

    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)
        out[i] = jax.grad(lambda v: jnp.sum(v * x[i]))(x[i] * 2)

    check(f, X, oracle=X)


def test_vmap_of_a_function_of_tiles() -> None:
    @kernel(((4, 6), np.float32))
    def f(x, out):
        i = tk.parallel(4, 3)

        def row(v):
            return tk.fold(tk.serial(2), lambda n, c: c + v * n, jnp.flip(v))

        out[i] = jax.vmap(row)(x[i])

    x = numbers(4, 6)
    check(f, x, oracle=x[:, ::-1] + x)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_vmap_of_a_load() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(10, 4)

        def one(n):
            return x[n]  # <-

        out[i] = jax.vmap(one)(i.indices)

    with refused(
        NotBatchableError,
        "a load or store inside a kernel cannot be mapped with jax.vmap",
        expected="jax.vmap of a function of tiles",
        got="indexes a ref",
        fix="an index vector to load all lanes at once",
    ):
        f.trace(X)


def test_vmap_of_a_store() -> None:
    @like_first
    def f(x, out):
        def one(n, v):
            out[n] = v  # <-

        jax.vmap(one)(jnp.arange(10), x[...])

    with refused(NotBatchableError, "cannot be mapped with jax.vmap", got="indexes a ref", fix="index vector"):
        f.trace(X)


def test_vmap_of_a_fold_with_mapped_bounds() -> None:
    @like_first
    def f(x, out):
        def one(n):
            return tk.fold(tk.serial(10, stop=n), lambda m, c: c + 1.0, 0.0)  # <-

        out[...] = jax.vmap(one)(jnp.arange(10))

    with refused(
        NotBatchableError, "the bounds of a fold cannot be mapped", expected="same", got="jax.vmap", fix="jnp.where"
    ):
        f.trace(X)


def _derivatives() -> dict[str, Any]:
    return {
        "jvp": lambda g, v: jax.jvp(g, (v,), (v,)),
        "vjp": lambda g, v: jax.vjp(g, v),
        "grad": lambda g, v: jax.grad(lambda u: jnp.sum(g(u)))(v),
        "linearize": lambda g, v: jax.linearize(g, v),
    }


@pytest.mark.parametrize("how", _derivatives())
def test_the_derivative_of_a_store(how: str) -> None:
    @like_first
    def f(x, out):
        def stores(v):
            out[...] = v  # <-
            return v

        _derivatives()[how](stores, x[...])

    with refused(
        NotDifferentiableError,
        "a load or store inside a kernel cannot be differentiated",
        expected="values of loads",
        got="around a store",
        fix="load first",
    ):
        f.trace(X)


@pytest.mark.parametrize("how", _derivatives())
def test_the_derivative_of_a_load_with_a_fill(how: str) -> None:
    @like_first
    def f(x, out):
        def loads(v):
            return x.load(tk.ds(8, 4), fill=v)  # <-

        _derivatives()[how](loads, x[0])
        out[...] = x[...]

    with refused(NotDifferentiableError, "cannot be differentiated", got="mask or fill depends", fix="load first"):
        f.trace(X)


@pytest.mark.parametrize("constant", [True, False], ids=["a store of a constant", "a store of what is differentiated"])
def test_a_store_in_a_loop_in_a_vjp_is_not_dropped(constant: bool) -> None:
    """JAX would drop the store silently: it traces the loop's body twice, and does not count effects."""

    @like_first
    def f(x, out):
        out[...] = x[...]

        def loop(v):
            def body(n, carry):
                out[...] = x[...] * 2 if constant else carry  # <-
                return carry + v

            return lax.fori_loop(0, 3, body, v)

        jax.vjp(loop, x[...])[1](x[...])

    kind, summary = (
        (TraceError, "a store was lost") if constant else (NotDifferentiableError, "a load or store inside a kernel")
    )
    with refused(kind, summary, expected=" ", got="store", fix="store"):
        f.trace(X)


def test_a_lost_store_says_where_stores_belong() -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]

        def loop(v):
            def body(n, carry):
                out[...] = x[...] * 2  # <-
                return carry + v

            return lax.fori_loop(0, 3, body, v)

        out[...] = jax.vjp(loop, x[...])[0]

    with refused(
        TraceError,
        "a store was lost: JAX dropped it while transforming the function around it",
        expected="stores outside of functions given to jax.vjp",
        got="a store inside such a function",
        fix="store it afterwards",
    ):
        f.trace(X)


def test_the_gradient_of_a_fold() -> None:
    @like_first
    def f(x, out):
        def power(v):
            return tk.fold(tk.serial(2), lambda n, c: c * v, v).sum()

        out[...] = jax.grad(power)(x[...])  # <-

    with refused(
        UnsupportedError,
        "a fold cannot be differentiated in reverse mode inside a kernel",
        expected="without folds",
        got="a tk.fold",
        fix="fold over its derivative",
    ):
        f.trace(X)
