"""Newton-Schulz steps against their formula and the singular value decomposition, and the optimizer on both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.training import adamw, muon, newton_schulz
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
    optimizer = muon(
        lambda count: 0.1 / (count + 1.0),
        beta=0.9,
        nesterov=nesterov,
        weight_decay=0.5,
        consistent_rms=0.2,
        matrices=lambda tree: jax.tree.map(lambda w: w.ndim > 1, tree),
    )
    state, mean = optimizer.init(weights), jax.tree.map(jnp.zeros_like, weights)
    for n, function in enumerate((jnp.cos, jnp.sin), 1):
        gradients = jax.tree.map(function, weights)
        updates, state = optimizer.update(gradients, state, weights)
        for name, w in weights.items():
            mean[name] = 0.9 * mean[name] + 0.1 * gradients[name]
            ahead = mean[name] / (1 - 0.9**n)
            if nesterov:
                ahead = 0.9 * mean[name] / (1 - 0.9 ** (n + 1)) + 0.1 * gradients[name] / (1 - 0.9**n)
            orthogonal = 0.2 * max(w.shape[-2:]) ** 0.5 * newton_schulz(ahead)
            np.testing.assert_allclose(updates[name], -0.1 / n * (orthogonal + 0.5 * w), rtol=2e-2, atol=1e-3)
            np.testing.assert_allclose(state.mu[name], mean[name], rtol=1e-5)


@pytest.mark.parametrize(("shape", "factor"), [((6, 24), 2.0), ((24, 6), 1.0)])
def test_updates_grow_with_the_outputs_of_a_layer(shape: tuple[int, int], factor: float) -> None:
    weight = normal(*shape)
    optimizer = muon(1.0, nesterov=False, dtype="float32")
    updates, _ = optimizer.update(weight, optimizer.init(weight))
    np.testing.assert_allclose(updates, -factor * newton_schulz(weight, dtype=jnp.float32), rtol=1e-3, atol=1e-5)


def test_other_weights_go_to_the_partner() -> None:
    """By default AdamW without weight decay; and what `matrices` leaves out."""
    weights = {"matrix": normal(4, 6), "embedding": normal(5, 6), "vector": normal(6)}

    def layers(tree: Any) -> Any:
        return {name: name == "matrix" for name in tree}

    default = adamw(0.1, weight_decay=0.0, nesterov=True)
    for optimizer, other in ((muon(0.1), default), (muon(0.1, partner=adamw(0.2)), adamw(0.2))):
        updates, state = optimizer.update(weights, optimizer.init(weights), weights)
        expected, _ = other.update(weights, other.init(weights), weights)
        np.testing.assert_allclose(updates["vector"], expected["vector"], rtol=1e-6)
        assert state.mu["vector"] is None and state.partner.first["matrix"] is None
    optimizer = muon(0.1, matrices=layers)
    updates, _ = optimizer.update(weights, optimizer.init(weights), weights)
    expected, _ = default.update(weights, default.init(weights), weights)
    np.testing.assert_allclose(updates["embedding"], expected["embedding"], rtol=1e-6)
    assert not np.allclose(updates["matrix"], expected["matrix"])


def test_matrices_decay_where_the_mask_is_true() -> None:
    weights = {"a": normal(4, 6), "b": normal(5, 6)}
    updates = {}
    for decay, mask in ((0.0, None), (0.5, None), (0.5, {"a": True, "b": False})):
        optimizer = muon(0.1, weight_decay=decay, weight_decay_mask=mask)
        updates[decay, mask is None], _ = optimizer.update(weights, optimizer.init(weights), weights)
    expected = {"a": updates[0.5, True]["a"], "b": updates[0.0, True]["b"]}
    jax.tree.map(np.testing.assert_array_equal, updates[0.5, False], expected)
    np.testing.assert_allclose(updates[0.5, True]["b"], expected["b"] - 0.05 * weights["b"], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_momentum_is_in_float32(dtype: str) -> None:
    """A gradient below the digits of the momentum in bfloat16 counts."""
    weight, optimizer = normal(2, 3).astype(dtype), muon(0.1, beta=0.5)
    state = optimizer.init(weight)
    for gradient in (1.0, 2.0**-12):
        updates, state = optimizer.update(jnp.full((2, 3), gradient, dtype), state)
        assert updates.dtype == dtype
    np.testing.assert_array_equal(state.mu, np.full((2, 3), 0.25 + 2.0**-13, np.float32))
    assert muon(0.1, mu_dtype="bfloat16").init(weight).mu.dtype == jnp.bfloat16


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
    with pytest.raises(ArgumentError, match=r"a weight float32\[3\]"):
        muon(0.1, matrices=lambda tree: True).init(jnp.ones(3))
    with pytest.raises(ArgumentError, match=r"a leaf int32\[2, 2\]"):
        muon(0.1).init(jnp.ones((2, 2), jnp.int32))
    with pytest.raises(ArgumentError, match="beta of muon is out of range"):
        muon(0.1, beta=1.0)
    with pytest.raises(ArgumentError, match="steps and coefficients"):
        muon(0.1, ns_coeffs=[COEFFICIENTS], ns_steps=2)
    with pytest.raises(ArgumentError, match="ns_steps of muon are known") as raised:
        jax.jit(lambda steps: muon(0.1, ns_steps=steps).init(jnp.ones((2, 2))))(3)
    assert "static_args" in raised.value.fix
