"""What has no derivative is refused at the user's line, with a remedy; nothing is silently zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import like_first, refused
from tilekern.errors import ArgumentError, NotDifferentiableError

X = jnp.arange(1.0, 9)


def total(kernel: Any) -> Any:
    return lambda x: jnp.sum(kernel(x))


def test_a_donated_input() -> None:
    @tk.kernel(out_type=lambda x: (), donate=("x",))
    def doubled(x):  # <-
        i = tk.parallel(x.shape[0], 4)
        x[i] = X[0] * 2

    with refused(NotDifferentiableError, "doubled writes to its input x", expected="stores outputs", fix="donate"):
        jax.grad(total(doubled))(X)


def test_a_load_of_what_is_stored() -> None:
    @like_first
    def twice(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i]
        out[i] = out[i] * 2  # <-

    with refused(NotDifferentiableError, "twice loads out, an output", expected="stores outputs", fix="variable"):
        jax.jvp(twice, (X,), (X,))


def test_an_atomic_that_is_no_sum() -> None:
    @tk.kernel(out_type=lambda x: tk.Zeros(jax.ShapeDtypeStruct((1,), x.dtype)))
    def greatest(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[0].max(x[i].max())  # <-

    with refused(NotDifferentiableError, "an atomic max", expected="atomic additions", fix="fold"):
        jax.grad(total(greatest))(X)


def test_a_fill() -> None:
    @like_first
    def filled(x, out):
        i = tk.parallel(x.shape[0], 3)
        out[i] = x.load(i, fill=x[0])  # <-

    with refused(NotDifferentiableError, "a load with a fill cannot be transposed", expected="a fill", fix="where"):
        jax.grad(total(filled))(X)


def test_a_fill_of_another_array() -> None:
    @like_first
    def filled(x, y, out):
        i = tk.parallel(x.shape[0], 3)
        out[i] = x.load(i, fill=y[0])  # <-

    with refused(NotDifferentiableError, "a fill of a load cannot be differentiated"):
        jax.grad(total(partial(filled, X)))(X)


def test_a_function_without_a_derivative_in_the_language() -> None:
    @like_first
    def logarithm(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = lax.lgamma(x[i])  # <-

    with refused(NotDifferentiableError, "lgamma has no derivative", expected="functions", fix="stop_gradient"):
        jax.grad(total(logarithm))(X)


def test_carries_that_take_too_much_memory() -> None:
    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct(w.shape, x.dtype), residuals=100)
    def powers(x, w, out, *, block: tk.Block = 2):
        def step(k, y):
            return jnp.sin(y * x[k].sum())

        out[...] = tk.fold(tk.serial(x.shape[0], block), step, w[...])  # <-

    with refused(
        NotDifferentiableError,
        "the backward pass of powers would save 128 bytes",
        expected="at most residuals = 100 bytes",
        got="f32[8] at each of 4 tiles",
        fix="residuals=",
    ):
        jax.grad(lambda w: powers(X, w).sum())(X)
    assert np.isfinite(jax.grad(lambda w: powers(X, w, block=4).sum())(X)).all()


@pytest.mark.parametrize("given", [-1, 1.5, None, True])
def test_residuals_are_a_number_of_bytes(given: Any) -> None:
    with refused(
        ArgumentError, "residuals is no number of bytes", expected="an int", got=f"residuals = {given}", fix="MiB"
    ):
        tk.kernel(out_type=lambda x: x, residuals=given)  # <-


def test_a_transposition_of_what_is_not_linear() -> None:
    @like_first
    def square(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] * x[i]  # <-

    with refused(NotDifferentiableError, "square is not linear", expected="sums", got="mul of it", fix="jax.vjp"):
        jax.linear_transpose(square, X)(X)


def test_a_transposition_of_what_is_linear() -> None:
    @like_first
    def shifted(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = 3 * x[tk.ds(i.index * 4 - 1, 4)]

    np.testing.assert_array_equal(jax.linear_transpose(shifted, X)(X)[0], [*3 * X[1:], 0])


def test_names_of_a_gradient() -> None:
    @tk.kernel(out_type=lambda x, n: x)
    def scaled(x, n, out):
        out[...] = x[...] * n[0]

    traced = scaled.trace(X, jnp.array([2]))
    assert len(traced.gradient("x").backward) == len(traced.gradient().backward) == 1
    for wrt in ("n", "y", ["x", "y"]):
        with refused(
            ArgumentError, "scaled has no gradient with respect to that", expected="floats", got="wrt", fix="x"
        ):
            traced.gradient(wrt)  # <-


def test_integers_have_no_tangents() -> None:
    @tk.kernel(out_type=lambda x, n: (x, n))
    def both(x, n, scaled, more):
        scaled[...] = x[...] * n[0]
        more[...] = n[...] + x[...].astype(jnp.int32)

    n = jnp.full(8, 3)
    (values, wholes), pull = jax.vjp(both, X, n)
    of_x, of_n = pull((X, np.zeros(8, jax.dtypes.float0)))
    np.testing.assert_array_equal(values, 3 * X)
    np.testing.assert_array_equal(of_x, 3 * X)
    assert of_n.dtype == jax.dtypes.float0 and wholes.dtype == n.dtype


def test_a_kernel_with_a_rule_for_transposition_only() -> None:
    """What it is linear in goes by its rule; there is none for the rest, and none is derived."""

    @tk.kernel(out_type=lambda x, y: x, linear=("y",))
    def product(x, y, out):
        i = tk.parallel(x.shape[0])
        out[i] = x[i] * y[i]

    product.deftranspose(lambda ct, x, y: {"y": product(x, ct)})
    np.testing.assert_array_equal(jax.grad(lambda y: product(X, y).sum())(X), X)
    with refused(
        NotDifferentiableError, "product has no derivative", expected="product.defjvp", got="product", fix="rule"
    ):
        jax.grad(lambda x: product(x, X).sum())(X)  # <-
