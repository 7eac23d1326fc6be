import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import like_first
from tilekern.errors import ArgumentError


def naive(factors: Any, terms: Any, axis: int = 0, *, reverse: bool = False) -> Any:
    """The same by JAX."""

    def after(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(after, (factors, terms), axis=axis, reverse=reverse)[1]


def arrays(*shape: int, dtype: Any = np.float32) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.uniform(-1, 1, shape).astype(dtype), random.standard_normal(shape).astype(dtype)]


def run(function: Callable[..., Any], factors: Any, terms: Any, how: str) -> Any:
    """A function of two whole tiles, in a kernel."""

    def body(factors: Any, terms: Any, out: Any) -> None:
        out[...] = function(factors[...], terms[...])

    traced = like_first(body).trace(factors, terms)
    return tk.interpret(traced)(factors, terms) if how == "interpret" else traced.lower(how).interpret(factors, terms)


@pytest.mark.parametrize("how", ["interpret", "cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"])
@pytest.mark.parametrize(("shape", "axis"), [((11,), 0), ((9, 5), 0), ((5, 9), -1), ((7, 3, 5), 0), ((3, 7, 5), 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_the_recurrence(how: str, shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    given = arrays(*shape)
    found = run(partial(tk.linear_scan, axis=axis, reverse=reverse), *given, how)
    np.testing.assert_allclose(found, naive(*given, axis % len(shape), reverse=reverse), rtol=1e-5, atol=1e-5)


def test_narrow_floats_are_computed_in_float32() -> None:
    factors, terms = np.ones(600, jnp.bfloat16), np.ones(600, jnp.bfloat16)
    assert float(run(tk.linear_scan, factors, terms, "interpret")[-1]) == 600


def test_derivatives_and_vmap_inside_of_a_body() -> None:
    def gradient(function: Any, factors: Any, terms: Any) -> Any:
        return jax.grad(lambda a, b: jnp.sin(jax.vmap(function)(a, b)).sum(), argnums=(0, 1))(factors, terms)

    given = arrays(3, 8)
    for scan, other in ((tk.linear_scan, naive), (partial(tk.linear_scan, reverse=True), partial(naive, reverse=True))):
        for n, expected in enumerate(gradient(other, *given)):
            found = run(lambda a, b, n=n, scan=scan: gradient(scan, a, b)[n], *given, "interpret")
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_one_operand_under_vmap() -> None:
    given = arrays(3, 8)
    found = run(lambda a, b: jax.vmap(tk.linear_scan, in_axes=(None, 0))(a[0], b), *given, "interpret")
    np.testing.assert_allclose(found, naive(jnp.broadcast_to(given[0][0], (3, 8)), given[1], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda a, b: tk.linear_scan(a[:2], b), "factors = float32[2, 4], terms = float32[3, 4], axis = 0"),
        (lambda a, b: tk.linear_scan(a.astype(jnp.bfloat16), b), "factors = bfloat16[3, 4]"),
        (lambda a, b: tk.linear_scan(a.astype(jnp.int32), b.astype(jnp.int32)), "factors = int32[3, 4]"),
        (lambda a, b: tk.linear_scan(a, b, 2), "axis = 2"),
        (lambda a, b: tk.linear_scan(0.5, b), "factors = 0.5"),
    ],
)
def test_wrong_operands(function: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        run(function, *arrays(3, 4), "interpret")
    assert "tk.linear_scan(" in caught.value.loc.snippet()
