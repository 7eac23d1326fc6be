"""Routing against loops over tokens in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from tilekern.distributed import (
    balanced_bias,
    limit_capacity,
    load_balancing_loss,
    moe,
    route,
    router_z_loss,
)
from tilekern.errors import ArgumentError

pytestmark = pytest.mark.one_backend


def deepseek(logits: np.ndarray, bias: np.ndarray | None, groups: int, top: int, chosen: int) -> list[list[int]]:
    """The choice token by token: groups by the sum of their best experts, then experts of these groups."""
    found = []
    for scores in 1 / (1 + np.exp(-logits.astype(np.float64))):
        order = scores if bias is None else scores + bias
        of_groups = np.sort(order.reshape(groups, -1), axis=1)[:, ::-1][:, : 1 if bias is None else 2].sum(1)
        kept = np.argsort(-of_groups, kind="stable")[:top]
        size = len(order) // groups
        experts = [e for e in range(len(order)) if e // size in kept]
        found.append(sorted(experts, key=lambda e: -order[e])[:chosen])
    return found


@settings(max_examples=10)
@given(data=st.data(), groups=st.integers(1, 4), size=st.integers(1, 4), biased=st.booleans())
def test_experts_come_from_the_best_groups(data: st.DataObject, groups: int, size: int, biased: bool) -> None:
    top = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, top * size))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = random.standard_normal((5, groups * size)).astype(np.float32)
    bias = random.standard_normal(groups * size).astype(np.float32) if biased else None
    experts, gates = route(
        jnp.asarray(logits),
        experts_per_token=chosen,
        gating="sigmoid",
        bias=None if bias is None else jnp.asarray(bias),
        groups=groups,
        top_groups=top,
        scale=2.5,
    )
    assert experts.tolist() == deepseek(logits, bias, groups, top, chosen)
    scores = np.take_along_axis(1 / (1 + np.exp(-logits.astype(np.float64))), np.asarray(experts), 1)
    np.testing.assert_allclose(gates, 2.5 * scores / scores.sum(1, keepdims=True), rtol=1e-5)


def test_a_bias_chooses_but_has_no_part_in_gates_and_derivatives() -> None:
    logits, bias = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0.0, 0.0, 5.0])

    def gates(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return route(logits, experts_per_token=2, bias=bias, normalize=False)[1]

    assert route(logits, experts_per_token=2, bias=bias)[0].tolist() == [[2, 0]]
    np.testing.assert_allclose(gates(logits, bias)[0], np.asarray(jax.nn.softmax(logits))[0][[2, 0]], rtol=1e-6)
    by_logits, by_bias = jax.grad(lambda *a: (gates(*a) * jnp.array([1.0, 3.0])).sum(), (0, 1))(logits, bias)
    assert not by_bias.any()
    wanted = jax.grad(lambda x: (jax.nn.softmax(x) @ jnp.array([3.0, 0, 1])).sum())(logits)
    np.testing.assert_allclose(by_logits, wanted, rtol=1e-6)


def test_a_bias_does_not_bring_back_experts_that_logits_rule_out() -> None:
    experts, gates = route(jnp.array([[0.0, -jnp.inf, 1.0]]), experts_per_token=2, bias=jnp.array([-9.0, 9.0, -9.0]))
    assert experts.tolist() == [[2, 0]] and np.isfinite(gates).all()


@settings(max_examples=10)
@given(tokens=st.integers(0, 7), chosen=st.integers(1, 3), capacity=st.integers(0, 4), seed=st.integers(0, 99))
def test_capacity_serves_first_choices_first(tokens: int, chosen: int, capacity: int, seed: int) -> None:
    number = 4
    experts = np.random.default_rng(seed).integers(-1, number + 1, (tokens, chosen), np.int32)
    gates = np.ones((tokens, chosen), np.float32)
    wanted, left = np.full_like(experts, -1), dict.fromkeys(range(number), capacity)
    for choice in range(chosen):
        for token in range(tokens):
            expert = int(experts[token, choice])
            if left.get(expert):
                left[expert] -= 1
                wanted[token, choice] = expert
    found, kept = limit_capacity(jnp.asarray(experts), jnp.asarray(gates), num_experts=number, capacity=capacity)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(kept, wanted >= 0)


def test_a_mixture_with_a_capacity_leaves_out_what_is_dropped() -> None:
    random = np.random.default_rng(3)
    x, logits = (jnp.asarray(random.standard_normal((6, n)), jnp.float32) for n in (3, 4))
    w_gate, w_up = (jnp.asarray(random.standard_normal((4, 3, 5)), jnp.float32) for _ in range(2))
    w_down = jnp.asarray(random.standard_normal((4, 5, 3)), jnp.float32)
    mixed = jax.jit(lambda: moe(x, logits, w_gate, w_up, w_down, experts_per_token=2, capacity=2, target="cpu:xla"))
    experts, gates = route(logits, experts_per_token=2)
    experts, gates = limit_capacity(experts, gates, num_experts=4, capacity=2)
    assert (np.asarray(experts) == -1).sum() >= 4  # 12 rows, room for 8
    wanted = np.zeros((6, 3))
    for token, choice in np.argwhere(np.asarray(experts) >= 0):
        e = int(experts[token, choice])
        hidden = jax.nn.silu(x[token] @ w_gate[e]) * (x[token] @ w_up[e])
        wanted[token] += np.asarray(gates[token, choice] * (hidden @ w_down[e]))
    np.testing.assert_allclose(mixed(), wanted, rtol=1e-5, atol=1e-5)


def test_losses_and_their_derivatives() -> None:
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((9, 4)), jnp.float32)
    experts = jnp.asarray(random.integers(0, 4, (9, 2)), jnp.int32)
    shares = np.bincount(np.asarray(experts).reshape(-1), minlength=4) / 18
    wide = np.exp(np.asarray(logits, np.float64))
    soft = wide / wide.sum(1, keepdims=True)
    np.testing.assert_allclose(load_balancing_loss(logits, experts), 4 * shares @ soft.mean(0), rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(logits), (np.log(wide.sum(1)) ** 2).mean(), rtol=1e-6)
    check_grads(jax.jit(lambda x: load_balancing_loss(x, experts)), (logits,), 2, eps=1e-2, rtol=2e-2)
    check_grads(jax.jit(router_z_loss), (logits,), 2, eps=1e-2, rtol=2e-2)


def test_uniform_routing_has_the_loss_one() -> None:
    experts = jnp.arange(8).reshape(4, 2) % 4
    assert load_balancing_loss(jnp.zeros((4, 4)), experts) == 1
    assert load_balancing_loss(jnp.array([[30.0, 0.0]]), jnp.array([[0]])) == 2  # all rows on one of two


def test_no_tokens() -> None:
    empty, none = jnp.zeros((0, 4)), jnp.zeros((0, 2), jnp.int32)
    assert load_balancing_loss(empty, none) == 0 and router_z_loss(empty) == 0
    assert balanced_bias(jnp.ones(4), none).tolist() == [1] * 4


def test_axes_average_over_devices() -> None:
    """On a mesh of one device, on which means and sums are those of the device."""
    random = np.random.default_rng(1)
    logits, experts = jnp.asarray(random.standard_normal((8, 4)), jnp.float32), jnp.arange(16).reshape(8, 2) % 3

    def local(logits: Any, experts: Any) -> Any:
        return (
            load_balancing_loss(logits, experts, axis_name="x"),
            router_z_loss(logits, axis_name="x"),
            balanced_bias(jnp.zeros(4), experts, axis_name="x"),
        )

    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    found = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P())(logits, experts)
    wanted = (load_balancing_loss(logits, experts), router_z_loss(logits), balanced_bias(jnp.zeros(4), experts))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_bias_balances_a_skewed_router() -> None:
    """A router that prefers two of eight experts for all tokens."""
    logits = jax.random.normal(jax.random.key(0), (512, 8)) + jnp.array([3.0, 3.0, 0, 0, 0, 0, 0, 0])

    @jax.jit
    def step(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, _ = route(logits, experts_per_token=2, gating="sigmoid", bias=bias)
        return balanced_bias(bias, experts, rate=0.01), jnp.bincount(experts.reshape(-1), length=8)

    bias = jnp.zeros(8)
    first = step(bias)[1].max()
    for _ in range(200):
        bias, counts = step(bias)
    assert first > 300 and counts.max() < 1.2 * 128


BAD: dict[str, tuple[Any, str]] = {
    "a bias of other length": (
        lambda x: route(x, experts_per_token=1, bias=jnp.zeros(3)),
        r"got: bias = float32\[3\]",
    ),
    "groups that do not divide": (lambda x: route(x, experts_per_token=1, groups=3), "groups that divide 4"),
    "more groups than there are": (
        lambda x: route(x, experts_per_token=1, groups=2, top_groups=3),
        "top_groups=3",
    ),
    "more experts than groups have": (
        lambda x: route(x, experts_per_token=3, groups=2, top_groups=1),
        "from 1 to 2, the experts of 1 groups",
    ),
    "a negative capacity": (
        lambda x: limit_capacity(jnp.zeros((2, 1), int), jnp.zeros((2, 1)), num_experts=4, capacity=-1),
        "capacity=-1",
    ),
    "a traced capacity": (
        lambda x: limit_capacity(jnp.zeros((2, 1), int), jnp.zeros((2, 1)), num_experts=4, capacity=jnp.int32(2)),  # pyright: ignore[reportArgumentType]
        "plain integers",
    ),
    "experts that are floats": (lambda x: load_balancing_loss(x, x), "integers experts"),
    "logits that are integers": (lambda x: router_z_loss(x.astype(int)), "of a float dtype"),
    "a bias of two dims": (lambda x: balanced_bias(x, jnp.zeros((2, 1), int)), r"bias\[E\]"),
    "an axis outside of a mesh": (lambda x: router_z_loss(x, axis_name="data"), "inside of jax.shard_map"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    call, text = BAD[name]
    with pytest.raises(ArgumentError, match=text) as error:
        call(jnp.zeros((2, 4)))
    assert error.value.fix
