"""Derived gradients of kernels whose bodies sort, gather, scan, and call functions with derivatives of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_near
from tilekern.errors import NotDifferentiableError

targets = pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])


def mixed(v: Any, n: Any) -> Any:
    moved = jnp.sort(v) * v + v[jnp.clip(n, 0, 3)] + jnp.concatenate([v[1:], v[:1] * 2])
    return moved + jax.lax.cummax(v) * jnp.cumprod(v) + v.max() + v.prod() + jax.lax.top_k(v, 4)[0]


@tk.kernel(out_type=lambda x, n: x)
def mixing(x, n, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = mixed(x[i], n[i])


@targets
def test_ties_and_equal_indices(target: str) -> None:
    x, n, w = jnp.float32([1, 2, 1, -3]), jnp.int32([0, 0, 7, 1]), jnp.float32([1, 0.5, 2, 3])
    got = jax.grad(lambda x: (w * mixing(x, n, target=target)).sum())(x)
    wanted = jax.grad(lambda x: (w * mixed(x, n)).sum())(x)
    np.testing.assert_array_equal(got, wanted)  # small numbers, so that all sums are exact


def ruled(x: Any) -> Any:
    return jax.nn.relu(x) * jax.nn.softplus(x) + jax.lax.stop_gradient(x) * x


@tk.kernel(out_type=lambda x: x)
def ruling(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = ruled(x[i])


@targets
def test_stated_derivatives_of_first_and_second_order(target: str) -> None:
    with jax.enable_x64(True):
        x = jnp.array([-1.0, 0.0, 1.0, 2.0])
        gradients = [jax.grad(lambda x, f=f: f(x).sum()) for f in (lambda x: ruling(x, target=target), ruled)]
        seconds = [jax.grad(lambda x, g=g: (x * g(x)).sum()) for g in gradients]
        for got, wanted in (gradients, seconds):
            assert_near(np.asarray(got(x)), np.asarray(wanted(x)), 1.0)


@jax.custom_vjp
def _cube(x):
    return x**3


_cube.defvjp(lambda x: (_cube(x), x), lambda x, g: (10 * x * g,))


@tk.kernel(out_type=lambda x: x)
def cubes(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = _cube(x[i])


def test_a_rule_of_reverse_mode_alone_is_refused_at_its_line() -> None:
    x = jnp.ones(8)
    np.testing.assert_array_equal(cubes(x), x)
    with pytest.raises(NotDifferentiableError, match="a derivative of its own cannot be differentiated") as error:
        jax.grad(lambda x: cubes(x).sum())(x)
    assert "out[i] = _cube(x[i])" in str(error.value) and "jax.custom_jvp" in str(error.value)


@tk.kernel(out_type=lambda count, x: x, donate=("count",))
def counting(count, x, out):
    """Squares, and in `count` how many elements are positive."""
    i = tk.parallel(x.shape[0], 4)
    count.at[0].add(jnp.sum(x[i] > 0, dtype=jnp.int32))
    out[i] = x[i] ** 2


@targets
def test_an_integer_that_programs_update_has_no_tangent(target: str) -> None:
    count, x = jnp.int32([5]), jnp.arange(-3.0, 7.0)
    (counted, _), (_, tangents) = jax.jvp(lambda x: counting(count, x, target=target), (x,), (x,))
    assert counted == 11
    np.testing.assert_array_equal(tangents, 2 * x * x)
    _, pull = jax.vjp(lambda count, x: counting(count, x, target=target)[1], count, x)
    of_count, of_x = pull(jnp.ones_like(x))
    assert of_count.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(of_x, 2 * x)
    slope = jax.grad(lambda x: jax.grad(lambda x: counting(count, x, target=target)[1].sum())(x).sum())
    np.testing.assert_array_equal(slope(x), jnp.full(10, 2.0))
