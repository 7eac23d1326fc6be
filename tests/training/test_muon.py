"""Newton-Schulz steps against their formula and the singular value decomposition, and the optimizer on both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.training import muon, newton_schulz
from tilekern.training.muon import COEFFICIENTS


def normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def polynomials(x: Any, steps: Any = (COEFFICIENTS,) * 5) -> Any:
    """The definition in float64: the polynomials of the singular values."""
    u, s, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / np.sqrt((s * s).sum(axis=-1, keepdims=True))
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (7, 7), (1, 5), (2, 3, 6, 9)])
def test_polynomials_of_singular_values(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    found = newton_schulz(x, dtype=jnp.float32)
    np.testing.assert_allclose(found, polynomials(x), rtol=1e-3, atol=1e-4)


def test_other_coefficients_in_each_step() -> None:
    """The cubic iteration goes to the orthogonal factor itself."""
    x, cubic = normal(8, 8) + 3 * jnp.eye(8), (1.5, -0.5, 0.0)
    steps = [COEFFICIENTS, *([cubic] * 12)]
    u, _, v = np.linalg.svd(np.asarray(x, np.float64))
    found = newton_schulz(x, steps=13, coefficients=steps, dtype=jnp.float32)
    np.testing.assert_allclose(found, u @ v, atol=1e-4)


def test_bfloat16_is_nearly_orthogonal() -> None:
    x = normal(48, 96)
    found = newton_schulz(x.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    values = np.linalg.svd(np.asarray(found, np.float64), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


def test_zeros_and_empty_ones() -> None:
    assert not newton_schulz(jnp.zeros((3, 4))).any()
    assert newton_schulz(jnp.zeros((0, 4))).shape == (0, 4)


def test_it_has_a_gradient() -> None:
    x = normal(4, 6)

    def plain(x: Any) -> Any:
        y = x / jnp.linalg.norm(x)
        for a, b, c in (COEFFICIENTS,) * 2:
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        return jnp.sum(jnp.sin(y))

    found = jax.grad(lambda x: jnp.sum(jnp.sin(newton_schulz(x, steps=2, dtype=jnp.float32))))(x)
    np.testing.assert_allclose(found, jax.grad(plain)(x), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_of_the_optimizer(nesterov: bool) -> None:
    weights = {"a": normal(6, 10), "b": normal(2, 5, 3)}
    optimizer = muon(0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.5)
    state, kept = optimizer.init(weights), jax.tree.map(jnp.zeros_like, weights)
    for function in (jnp.cos, jnp.sin):
        gradients = jax.tree.map(function, weights)
        updates, state = optimizer.update(gradients, state, weights)
        for name, w in weights.items():
            kept[name] = 0.9 * kept[name] + gradients[name]
            ahead = gradients[name] + 0.9 * kept[name] if nesterov else kept[name]
            orthogonal = 0.2 * max(w.shape[-2:]) ** 0.5 * newton_schulz(ahead)
            np.testing.assert_allclose(updates[name], -0.1 * (orthogonal + 0.5 * w), rtol=2e-2, atol=1e-3)
            np.testing.assert_allclose(state.momentum[name], kept[name], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_momentum_is_in_float32(dtype: str) -> None:
    """A gradient below the digits of the momentum in bfloat16 counts."""
    weight, optimizer = normal(2, 3).astype(dtype), muon(0.1, momentum=1.0)
    state = optimizer.init(weight)
    for gradient in (1.0, 2.0**-12):
        updates, state = optimizer.update(jnp.full((2, 3), gradient, dtype), state)
        assert updates.dtype == dtype
    np.testing.assert_array_equal(state.momentum, np.full((2, 3), 1 + 2.0**-12, np.float32))


def test_it_trains() -> None:
    """Least squares: the loss falls to a hundredth."""
    x, w = normal(64, 8), normal(8, 16)
    loss = lambda v: jnp.mean((x @ v - x @ w) ** 2)  # noqa: E731
    optimizer, weights = muon(0.2), jnp.zeros((8, 16))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, rate: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return weights + rate * updates, state

    first = loss(weights)
    for n in range(100):
        weights, state = step(weights, state, 1 - n / 100)
    assert loss(weights) < 0.01 * first


def test_errors() -> None:
    with pytest.raises(ArgumentError, match=r"x = float32\[3\]"):
        newton_schulz(jnp.ones(3))
    wrong: list[dict[str, Any]] = [{"steps": 2, "coefficients": [COEFFICIENTS]}, {"coefficients": (1.0, 2.0)}]
    for options in [*wrong, {"steps": "5"}, {"coefficients": None}]:
        with pytest.raises(ArgumentError, match="steps and coefficients"):
            newton_schulz(jnp.ones((3, 3)), **options)
    optimizer = muon(0.1, weight_decay=0.1)
    with pytest.raises(ArgumentError, match="needs the weights"):
        optimizer.update(jnp.ones((2, 2)), optimizer.init(jnp.ones((2, 2))))
