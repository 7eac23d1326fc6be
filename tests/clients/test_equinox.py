"""Equinox: its modules as trees of our optimizers, and our functions in its modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern import nn, training

eqx = pytest.importorskip("equinox", reason="needs equinox")
optax = pytest.importorskip("optax", reason="needs optax")

X = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)


class Block(eqx.Module):
    """A layer with a norm, and with fields that are no arrays of floats."""

    linear: Any
    scale: jax.Array
    steps: jax.Array
    name: str = eqx.field(static=True)
    activation: Any

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Linear(6, 6, key=key)
        self.scale, self.steps, self.name, self.activation = jnp.ones(6), jnp.arange(3), "block", jax.nn.gelu

    def __call__(self, x: Any) -> Any:
        return self.activation(jax.vmap(self.linear)(nn.rms_norm(x, self.scale)))


def loss(model: Any) -> Any:
    return jnp.mean((model(X) - jnp.sin(X)) ** 2)


def train(optimizer: Any, steps: int = 20) -> Any:
    model = Block(jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        gradients = eqx.filter_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for _ in range(steps):
        model, state = step(model, state)
    return model


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_module_is_trained_as_by_optax(name: str) -> None:
    pairs = {
        "adamw": (training.adamw(0.01), optax.adamw(0.01)),
        "muon": (training.muon(0.01, dtype="float32"), optax.contrib.muon(0.01)),
    }
    ours, theirs = map(train, pairs[name])
    assert loss(ours) < 0.9 * loss(Block(jax.random.key(0)))
    for found, expected in zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (ours, theirs)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_the_step_in_place() -> None:
    optimizer = training.adamw_in_place(0.01)
    model = Block(jax.random.key(0))
    weights, others = eqx.partition(model, eqx.is_inexact_array)
    gradients = eqx.filter_grad(loss)(model)
    moved, _ = jax.jit(optimizer.step)(weights, optimizer.init(weights), gradients)
    assert loss(eqx.combine(moved, others)) < loss(model)
