"""`adamw` as a transformation: its definition in float64, trees, dtypes, errors. tests/clients has optax."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.training import adamw, adamw_in_place

RANDOM = np.random.default_rng(0)
WEIGHTS = {name: RANDOM.standard_normal(shape) for name, shape in {"w": (4, 6), "b": (6,), "c": ()}.items()}
GRADIENTS = [{name: RANDOM.standard_normal(w.shape) for name, w in WEIGHTS.items()} for _ in range(4)]


def definition(name: str, nesterov: bool, decay: float) -> Any:
    """Loshchilov and Hutter in float64; Dozat 2016 for the look ahead."""
    w, m, v = WEIGHTS[name], 0.0, 0.0
    for n, gradients in enumerate(GRADIENTS, 1):
        g = gradients[name]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mean = 0.9 * m / (1 - 0.9 ** (n + 1)) + 0.1 * g / (1 - 0.9**n) if nesterov else m / (1 - 0.9**n)
        w = w - 0.1 / n * (mean / (np.sqrt(v / (1 - 0.999**n) + 1e-4) + 1e-8) + decay * w)
    return w


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_with_a_schedule_and_a_mask(dtype: str, nesterov: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        mask = {"w": True, "b": False, "c": False}
        optimizer = adamw(
            lambda count: 0.1 / (count + 1.0), eps_root=1e-4, weight_decay=0.3, mask=mask, nesterov=nesterov
        )
        weights = jax.tree.map(lambda w: jnp.asarray(w, dtype), WEIGHTS)
        state = optimizer.init(weights)
        for gradients in GRADIENTS:
            gradients = jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients)
            updates, state = jax.jit(optimizer.update)(gradients, state, weights)
            weights = jax.tree.map(jnp.add, weights, updates)
    assert state.count == 4
    for name, found in weights.items():
        assert found.dtype == dtype
        exact = definition(name, nesterov, 0.3 if name == "w" else 0.0)
        np.testing.assert_allclose(found, exact, rtol=64 * np.finfo(dtype).eps, atol=16 * np.finfo(dtype).eps)


def test_the_first_step_is_exact() -> None:
    """1 - 0.999 is a number of few digits in float32; the correction of the second moment does not cancel."""
    optimizer = adamw(1.0, eps=0.0, weight_decay=0.0)
    gradient = jnp.float32([1e-3, -7.0])
    updates, _ = optimizer.update(gradient, optimizer.init(gradient))
    np.testing.assert_allclose(updates, [-1, 1], rtol=4e-7)


def test_the_state_is_that_of_the_step_in_place() -> None:
    weights, gradients = (jax.tree.map(jnp.float32, tree) for tree in (WEIGHTS, GRADIENTS[0]))
    slow, fast = adamw(0.1), adamw_in_place(0.1)
    _, state = slow.update(gradients, slow.init(weights), weights)
    updates, _ = slow.update(gradients, state, weights)
    moved, _ = fast.step(weights, jax.tree.map(jnp.array, state), gradients)
    for name in weights:
        np.testing.assert_allclose(moved[name], weights[name] + updates[name], rtol=1e-5, atol=1e-6)


def test_numbers_may_be_traced() -> None:
    weights, gradients = (jax.tree.map(jnp.float32, tree) for tree in (WEIGHTS, GRADIENTS[0]))

    def updated(numbers: Any) -> Any:
        optimizer = adamw(**numbers)
        return optimizer.update(gradients, optimizer.init(weights), weights)[0]

    numbers = {"learning_rate": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "eps_root": 1e-3, "weight_decay": 0.1}
    for found, expected in zip(*map(jax.tree.leaves, (jax.jit(updated)(numbers), updated(numbers))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.isnan(jax.jit(updated)({**numbers, "b1": 0.0})["w"]).any()


def test_dtypes() -> None:
    weights = jax.tree.map(jnp.bfloat16, WEIGHTS)
    state = adamw(0.1, mu_dtype="bfloat16").init(weights)
    assert state.first["w"].dtype == jnp.bfloat16 and state.second["w"].dtype == jnp.float32
    updates, _ = adamw(0.1).update(weights, adamw(0.1).init(weights), jax.tree.map(jnp.float32, weights))
    assert updates["w"].dtype == jnp.float32


WRONG: dict[str, tuple[Any, str]] = {
    "b1": (lambda: adamw(0.1, b1=1.0), "b1 = 1.0"),
    "eps": (lambda: adamw(0.1, eps=-1.0), "eps = -1.0"),
    "decay": (lambda: adamw(0.1, weight_decay="x"), "weight_decay = 'x'"),
    "weights": (lambda: adamw(0.1).init({"w": jnp.ones(2, jnp.int32)}), "a leaf int32[2]"),
    "no weights": (lambda: adamw(0.1).update(jnp.ones(2), adamw(0.1).init(jnp.ones(2))), "params = None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    wrong, got = WRONG[name]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        wrong()
    assert caught.value.loc.file == __file__
