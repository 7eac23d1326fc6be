"""AdamW against its definition in float64 over several steps, in place, on one device and on many."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.training import AdamWState, adamw_in_place

SHAPES = {"matrix": (24, 40), "stack": (2, 3, 4, 9), "vector": (37,), "scalar": (), "empty": (0, 5)}


def tree(dtype: Any = np.float32, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def definition(weight: Any, gradients: list[Any], rates: list[float], decay: float, scale: float = 1.0) -> Any:
    """The algorithm of Loshchilov and Hutter in float64, with the usual numbers."""
    w, m, v = np.asarray(weight, np.float64), 0.0, 0.0
    for n, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = scale * np.asarray(gradient, np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - rate * (m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8) + decay * w)
    return w, m, v


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_with_a_schedule_a_mask_and_a_scale(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        weights, gradients = tree(dtype), [tree(dtype, n) for n in range(1, 5)]
        rates = [0.1 / (n + 1) for n in range(4)]
        optimizer = adamw_in_place(
            lambda count: 0.1 / (count + 1.0), weight_decay=0.3, mask=lambda w: jax.tree.map(lambda x: x.ndim > 1, w)
        )
        step = jax.jit(optimizer.step)
        state, moved = optimizer.init(weights), weights
        for gradient in gradients:
            moved, state = step(moved, state, gradient, scale=0.5)
        assert state.count == 4
        rtol = 16 * np.finfo(dtype).eps
        for name, weight in weights.items():
            decay = 0.3 if weight.ndim > 1 else 0.0
            expected = definition(weight, [g[name] for g in gradients], rates, decay, 0.5)
            for found, exact in zip((moved[name], state.first[name], state.second[name]), expected, strict=True):
                assert found.dtype == dtype and found.shape == weight.shape
                np.testing.assert_allclose(found, exact * np.ones(weight.shape), rtol=rtol, atol=rtol)


def test_a_share_of_0_keeps_nothing_of_the_moments() -> None:
    """With no moments a step is the sign of the gradient."""
    weights, gradients, optimizer = tree(), tree(seed=1), adamw_in_place(0.5, b1=0, b2=0, eps=0, weight_decay=0)
    moved, state = optimizer.step(weights, optimizer.init(weights), tree(seed=2))
    moved, state = optimizer.step(weights, state, gradients)
    for name, weight in weights.items():
        np.testing.assert_allclose(moved[name], weight - 0.5 * np.sign(gradients[name]), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(state.first[name], gradients[name])


def test_eager_calls_are_those_under_jit() -> None:
    weights, gradients, optimizer = tree("bfloat16"), tree("float32", 1), adamw_in_place(0.01, moments="bfloat16")
    state = optimizer.init(weights)
    eager, jitted = (f(weights, state, gradients) for f in (optimizer.step, jax.jit(optimizer.step)))
    for one, other in zip(jax.tree.leaves(eager[0]), jax.tree.leaves(jitted[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {x.dtype for x in jax.tree.leaves(eager[1].first)} == {jnp.dtype("bfloat16")}


def test_steps_below_the_digits_of_bfloat16_survive() -> None:
    """A thousand steps of 1e-4 from 1.0, where neighbours are 2^-8 apart below."""
    weights, gradients = {"w": jnp.ones((64, 64), jnp.bfloat16)}, {"w": jnp.ones((64, 64))}

    def after(**options: Any) -> np.ndarray:
        optimizer = adamw_in_place(1e-4, weight_decay=0.0, **options)

        def body(carry: Any, _: Any) -> Any:
            return optimizer.step(*carry, gradients), None

        (moved, _), _ = jax.jit(lambda w: jax.lax.scan(body, (w, optimizer.init(w)), length=1000))(weights)
        return np.asarray(moved["w"], np.float64)

    assert (after(stochastic=False) == 1.0).all()
    found = after()
    assert found.mean() == pytest.approx(0.9, abs=5 * found.std() / math.sqrt(found.size))
    assert found.std() < 0.05
    assert (after(seed=1) != found).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_state_are_written_in_place(dtype: str) -> None:
    """The program has no copy of a donated array, and little memory of its own."""
    weights = {name: jnp.ones((256, 512), dtype) for name in "ab"}
    optimizer = adamw_in_place(0.1)
    state = optimizer.init(weights)
    gradients = jax.tree.map(jnp.ones_like, weights)
    compiled = jax.jit(optimizer.step, donate_argnums=(0, 1)).lower(weights, state, gradients).compile()
    memory: Any = compiled.memory_analysis()
    each = 256 * 512 * (jnp.dtype(dtype).itemsize + 4 + 4)
    assert memory.alias_size_in_bytes >= 2 * each
    assert memory.temp_size_in_bytes < each / 8
    assert not re.findall(r"256,512\]\S* copy\(", compiled.as_text())
    moved, after = compiled(weights, state, gradients)
    assert all(x.is_deleted() for x in jax.tree.leaves((weights, state.first, state.second)))
    assert not any(x.is_deleted() for x in jax.tree.leaves((moved, after, gradients)))


def test_weights_of_several_models_at_once() -> None:
    weights = jax.tree.map(lambda *x: jnp.stack(x), *(tree("bfloat16", n) for n in range(3)))
    gradients, optimizer = jax.tree.map(jnp.cos, weights), adamw_in_place(0.1)
    state = jax.vmap(optimizer.init)(weights)
    found, _ = jax.jit(jax.vmap(optimizer.step, in_axes=(0, AdamWState(None, 0, 0), 0)))(
        weights, AdamWState(jnp.int32(0), state.first, state.second), gradients
    )
    for n in range(3):
        one = partial(jax.tree.map, lambda x: x[n])  # noqa: B023 -- used at once
        alone, _ = optimizer.step(one(weights), optimizer.init(one(weights)), one(gradients))
        for name in SHAPES:
            np.testing.assert_array_equal(found[name][n], alone[name])


def test_it_trains() -> None:
    """Least squares in bfloat16: the loss falls to a hundredth."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((64, 8), (8, 16)))
    loss = lambda v: jnp.mean((x @ v.astype(jnp.float32) - x @ w) ** 2)  # noqa: E731
    optimizer, weights = (
        adamw_in_place(lambda count: 0.1 * (1 - count / 200), weight_decay=0.0),
        jnp.zeros((8, 16), "bfloat16"),
    )
    state, step = optimizer.init(weights), jax.jit(lambda w, s: optimizer.step(w, s, jax.grad(loss)(w)))
    first = loss(weights)
    for _ in range(200):
        weights, state = step(weights, state)
    assert loss(weights) < 0.01 * first


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"b1": 1.0}, "b1 = 1.0"),
        ({"b2": -0.1}, "b2 = -0.1"),
        ({"eps": math.nan}, "eps = nan"),
        ({"weight_decay": "no"}, "weight_decay = 'no'"),
        ({"moments": "int8"}, "moments = 'int8'"),
        ({"moments": "float8_e4m3fn"}, "moments = 'float8_e4m3fn'"),
        ({"moments": 3.5}, "moments = 3.5"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        adamw_in_place(0.1, **options)  # here
    assert "# here" in caught.value.loc.snippet()


def test_arrays_that_do_not_fit() -> None:
    optimizer = adamw_in_place(0.1)
    with pytest.raises(ArgumentError, match=re.escape("weight = int32[2]")):
        optimizer.init({"w": jnp.zeros(2, jnp.int32)})
    state = optimizer.init({"w": jnp.zeros(2)})
    with pytest.raises(ArgumentError, match=re.escape("weight = float32[2], gradient = float32[3]")) as caught:
        optimizer.step({"w": jnp.zeros(2)}, state, {"w": jnp.zeros(3)})  # here
    assert "# here" in caught.value.loc.snippet()
