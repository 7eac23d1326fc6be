"""optax: our transformations against its own, and in what is built on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern import training
from tilekern.testing import assert_close, in_float64

optax = pytest.importorskip("optax", reason="needs optax")

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "matrix": RANDOM.standard_normal((12, 20), np.float32),
    "tall": RANDOM.standard_normal((9, 5), np.float32),
    "vector": RANDOM.standard_normal(7, np.float32),
    "stack": RANDOM.standard_normal((2, 3, 4), np.float32),
}
TARGETS = {name: RANDOM.standard_normal(w.shape).astype(np.float32) for name, w in WEIGHTS.items()}


def train(optimizer: Any, *leaves: Any, steps: int = 20) -> list[Any]:
    """The weights after some steps on a loss that is not quadratic."""
    weights = dict(zip(WEIGHTS, leaves, strict=True))

    def loss(weights: Any) -> Any:
        return sum(jnp.sum(jnp.cosh(weights[name] - TARGETS[name])) for name in weights)

    def step(carry: Any, _: Any) -> Any:
        weights, state = carry
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(step, (weights, optimizer.init(weights)), length=steps)
    return [weights[name] for name in WEIGHTS]


def check(ours: Any, theirs: Any, factor: float = 3, **options: Any) -> None:
    """20 steps of both, by the rule."""
    leaves = list(WEIGHTS.values())
    oracle = in_float64(lambda *a: train(theirs, *a), *leaves)
    found, low = (jax.jit(lambda *a, o=o: train(o, *a))(*leaves) for o in (ours, theirs))
    for out, exact, naive, start in zip(found, oracle, low, leaves, strict=True):
        assert np.abs(exact - start).max() > 1e-3  # it moved
        assert_close(out, exact, naive, length=20, factor=factor, **options)


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim == 2, tree)


SCHEDULE = optax.cosine_decay_schedule(0.05, 20)
ADAMW: dict[str, dict[str, Any]] = {
    "defaults": {"learning_rate": 0.01},
    "schedule": {"learning_rate": SCHEDULE, "weight_decay": 0.1},
    "mask": {"learning_rate": 0.02, "weight_decay": 0.3, "mask": matrices},
    "prefix": {"learning_rate": 0.02, "weight_decay": 0.3, "mask": {**dict.fromkeys(WEIGHTS, True), "vector": False}},
    "nesterov": {"learning_rate": 0.01, "nesterov": True, "eps_root": 1e-3, "b1": 0.8, "b2": 0.99},
}


@pytest.mark.parametrize("name", ADAMW)
def test_adamw(name: str) -> None:
    check(training.adamw(**ADAMW[name]), optax.adamw(**ADAMW[name]))


MUON: dict[str, dict[str, Any]] = {
    "defaults": {"learning_rate": 0.01},
    "schedule": {"learning_rate": SCHEDULE, "weight_decay": 0.1, "nesterov": False},
    "mask": {"learning_rate": 0.02, "weight_decay": 0.3, "weight_decay_mask": matrices, "consistent_rms": 0.2},
    "coefficients": {"learning_rate": 0.01, "ns_coeffs": ((4.0, -6.0, 2.5), (3.0, -3.5, 1.5)), "ns_steps": 2},
}


@pytest.mark.parametrize("name", MUON)
def test_muon(name: str) -> None:
    check(training.muon(**MUON[name], dtype="float32"), optax.contrib.muon(**MUON[name]))


def test_partners_of_muon_by_name() -> None:
    mine = training.muon(0.01, partner=optax.sgd(0.003, momentum=0.9), dtype="float32")
    named = {"muon": optax.contrib.muon(0.01), "sgd": optax.sgd(0.003, momentum=0.9)}
    check(mine, optax.partition(named, {n: "muon" if w.ndim == 2 else "sgd" for n, w in WEIGHTS.items()}))


def our(rate: Any) -> dict[str, Any]:
    return {"adamw": training.adamw(rate), "muon": training.muon(rate, dtype="float32")}


def optaxs(rate: Any) -> dict[str, Any]:
    return {"adamw": optax.adamw(rate), "muon": optax.contrib.muon(rate)}


NAMES = pytest.mark.parametrize("name", ["adamw", "muon"])


@NAMES
def test_in_a_chain(name: str) -> None:
    check(*(optax.chain(optax.clip_by_global_norm(1.0), make(SCHEDULE)[name]) for make in (our, optaxs)))


@NAMES
def test_in_a_partition(name: str) -> None:
    labels = {"matrix": "ours", "tall": "frozen", "vector": "ours", "stack": "sgd"}

    def parted(make: Any) -> Any:
        return optax.partition(
            {"ours": make(0.01)[name], "sgd": optax.sgd(0.01), "frozen": optax.set_to_zero()}, labels
        )

    leaves = list(WEIGHTS.values())
    found, low = (train(parted(make), *leaves) for make in (our, optaxs))
    oracle = in_float64(lambda *a: train(parted(optaxs), *a), *leaves)
    for out, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(out, exact, naive, length=20, factor=3)
    np.testing.assert_array_equal(found[1], WEIGHTS["tall"])


@NAMES
def test_with_injected_hyperparameters(name: str) -> None:
    """They stand in the state, may change between steps, and follow schedules."""
    ours, theirs = {"adamw": (training.adamw, optax.adamw), "muon": (training.muon, optax.contrib.muon)}[name]
    more = {"dtype": "float32"} if name == "muon" else {}
    static = {"static_args": ("ns_steps",)} if name == "muon" else {}
    mine = optax.inject_hyperparams(ours)(learning_rate=SCHEDULE, weight_decay=0.1, **more)
    check(mine, optax.inject_hyperparams(theirs, **static)(learning_rate=SCHEDULE, weight_decay=0.1))
    state = mine.init(WEIGHTS)
    state.hyperparams["weight_decay"] = jnp.float32(0.0)
    zeros = jax.tree.map(jnp.zeros_like, WEIGHTS)
    updates, state = mine.update(zeros, state, WEIGHTS)
    assert not any(map(np.any, updates.values())) and float(state.hyperparams["learning_rate"]) == pytest.approx(0.05)


@NAMES
def test_in_multi_steps(name: str) -> None:
    check(*(optax.MultiSteps(make(0.02)[name], every_k_schedule=4) for make in (our, optaxs)))


@NAMES
def test_other_wrappers(name: str) -> None:
    mine = our(0.01)[name]
    wrapped = [optax.apply_if_finite(mine, 3), optax.lookahead(mine, 5, 0.5), optax.masked(mine, matrices(WEIGHTS))]
    for optimizer in (*wrapped, optax.with_extra_args_support(mine), optax.contrib.schedule_free(mine, 0.01)):
        start = optax.LookaheadParams.init_synced(WEIGHTS) if optimizer is wrapped[1] else WEIGHTS
        updates, _ = optimizer.update(TARGETS, optimizer.init(start), start)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
        assert jax.tree.structure(optax.apply_updates(start, updates)) == jax.tree.structure(start)


@NAMES
def test_weights_of_bfloat16(name: str) -> None:
    """Updates have the dtype of the weights, moments are in float32."""
    weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), WEIGHTS)
    optimizer = our(0.01)[name]
    state = optimizer.init(weights)
    updates, state = optimizer.update(weights, state, weights)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
