"""Functions with derivatives of their own in the body of a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_near
from tilekern.autodiff.tangents import tangents
from tilekern.errors import NotDifferentiableError
from tilekern.ir.core import Func, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.memory import Load, Store
from tilekern.ir.parse import parse
from tilekern.testing.support import Sketch

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = np.array([-1.5, -0.0, 0.0, 0.5, 2.0, np.inf, -np.inf])


def traced(function: Callable[[Any], Any], x: np.ndarray) -> Func:
    @tk.kernel(out_type=lambda x: x)
    def kernel(x, out):
        out[...] = function(x[...])

    with jax.enable_x64(True):
        return kernel.trace(x).ir


def tangent(func: Func, x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The tangent of a Func of straight-line code with one input and one output."""
    sketch = Sketch()

    def body() -> list[Value]:
        moving: dict[Value, Value | None] = {}
        stored: list[Value] = []
        for op in func.body.ops:
            if isinstance(op, Load):
                known, given = sketch.tile(x.dtype, x.shape), sketch.tile(t.dtype, t.shape)
                loaded[op.result], moving[op.result] = known, given
            elif isinstance(op, Store):
                found = moving[op.value]
                assert found is not None
                stored.append(found)
            else:
                copy = op.copy(tuple(loaded.get(v, v) for v in op.operands))
                sketch.add(copy)
                loaded[op.result] = copy.result
                (moving[op.result],) = tangents(
                    copy, copy.operands, copy.results, [moving.get(v) for v in op.operands], Make(sketch, op)
                )
        return stored

    loaded: dict[Value, Value] = {}
    return interpret(sketch.func("t", body), x, t)[0]


@jax.custom_jvp
def _square(x):
    return x * x


_square.defjvp(lambda primals, tangents: (_square(*primals), 100 * primals[0] * tangents[0]))


@jax.custom_jvp
def _pair(x, n):
    return x + n, x * n


@_pair.defjvp
def _pair_jvp(primals, tangents):
    (x, n), (t, _) = primals, tangents
    return _pair(x, n), (7 * t, jnp.exp(x) * t)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.relu,
        jax.nn.softplus,
        lambda x: jnp.logaddexp(x, x),
        lambda x: _square(_square(x)),
        lambda x: _pair(x, jnp.arange(x.shape[0]))[1] + 2 * _pair(x, 3)[0],
        lambda x: jax.nn.relu(x) - jax.lax.stop_gradient(jax.nn.relu(x)),
    ],
    ids=["relu", "softplus", "logaddexp", "nested", "several results", "stopped"],
)
def test_the_stated_derivative_is_kept(function: Callable[[Any], Any]) -> None:
    func, t = traced(function, X), np.linspace(1, 2, len(X))
    assert str(parse(str(func))) == str(func)
    with jax.enable_x64(True):
        _, wanted = jax.jvp(function, (X,), (t,))
    assert_near(tangent(func, X, t), np.asarray(wanted), 1.0)


@jax.custom_vjp
def _cube(x):
    return x * x * x


_cube.defvjp(lambda x: (_cube(x), x), lambda x, g: (10 * x * g,))


@jax.custom_jvp
def _failing(x):
    return x + 1


@_failing.defjvp
def _failing_jvp(primals, tangents):
    raise ValueError("no rule for you")


@jax.custom_jvp
def _capturing(x):
    return x + 1


_LARGE = np.arange(10_000.0)
_capturing.defjvp(lambda primals, tangents: (primals[0], tangents[0] * jnp.asarray(_LARGE)[: len(X)]))


@pytest.mark.parametrize(
    "function, reason",
    [
        (_cube, "a function of jax.custom_vjp, whose rule is for reverse mode alone"),
        (_failing, "a rule that fails: ValueError no rule for you"),
        (_capturing, "a rule that fails: UnsupportedError the rule captures an array"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_an_error_of_derivatives_alone(function: Any, reason: str) -> None:
    func = traced(lambda x: function(x), X)
    np.testing.assert_array_equal(interpret(func, X)[0], np.asarray(X**3 if function is _cube else X + 1))
    with pytest.raises(NotDifferentiableError, match="a derivative of its own cannot be differentiated") as error:
        tangent(func, X, X)
    assert reason in str(error.value)
    assert "lambda x: function(x)" in error.value.loc.snippet()


def test_no_program_sees_a_derivative() -> None:
    @tk.kernel(out_type=lambda x: x)
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = jax.nn.relu(x[i]) + _cube(x[i])

    @tk.kernel(out_type=lambda x: x)
    def plain(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = jnp.maximum(x[i], 0) + x[i] * x[i] * x[i]

    x = np.float32(X[:4])
    assert "custom_derivative" in str(kernel.trace(x))
    for target in ("cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"):
        kinds = [re.sub(r":\d+", "", k.trace(x).lower(target).plan) for k in (kernel, plain)]
        assert kinds[0].replace("kernel", "plain") == kinds[1]
        assert "custom_derivative" not in kernel.trace(x).lower(target).text
    np.testing.assert_array_equal(kernel(x), plain(x))


def _scaled(factors: np.ndarray) -> Any:
    @jax.custom_jvp
    def scaled(x):
        return x * jnp.asarray(factors)

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * _TRIPLED(primals[0])))
    return scaled


_DOUBLED, _TRIPLED = _scaled(np.arange(4.0)), _scaled(np.arange(4.0) ** 2)


def test_a_function_that_differs_in_its_constants_is_another_one() -> None:
    x, t = X[:4], np.ones(4)
    with jax.enable_x64(True):
        _, wanted = jax.jvp(_DOUBLED, (x,), (t,))
    assert_near(tangent(traced(lambda x: _DOUBLED(x), x), x, t), np.asarray(wanted))
