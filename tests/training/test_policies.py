"""Losses of policies: against their definitions on whole logits, and gradients by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.programs import arrays_of
from tilekern.errors import ArgumentError
from tilekern.training import dpo_loss, grpo_loss, token_log_probabilities

PAIRS, TOKENS, WIDTH, VOCABULARY = 3, 5, 8, 30
LABELS = np.random.default_rng(1).integers(0, VOCABULARY, (2 * PAIRS, TOKENS)).astype(np.int32)
LABELS[:, 0] = -100  # the prompt
LABELS[1, 3:] = -100  # a shorter answer


def arrays() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = (2 * PAIRS, TOKENS, WIDTH), (WIDTH, VOCABULARY)
    return tuple(jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes)


def whole(hidden: Any, weight: Any, temperature: float = 1.0) -> Any:
    """`token_log_probabilities` by log_softmax."""
    logits = jnp.matmul(hidden, weight, precision="highest") / temperature
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(LABELS, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(LABELS == -100, 0, picked)


def close(found: Any, wanted: Any) -> None:
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, w, rtol=2e-5, atol=2e-6)


def test_log_probabilities() -> None:
    hidden, weight = arrays()
    close(token_log_probabilities(hidden, weight, LABELS, temperature=0.7), whole(hidden, weight, 0.7))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    """The gradient is -β σ(-β Δ) times that of the difference (Rafailov et al., section 4), less ε β."""
    hidden, weight = arrays()
    before = whole(0.5 * hidden, weight).sum(axis=1).reshape(2, PAIRS)

    def loss(log_probabilities: Any, hidden: Any, weight: Any) -> Any:
        chosen, rejected = log_probabilities(hidden, weight).sum(axis=1).reshape(2, PAIRS)
        return dpo_loss(chosen, rejected, *before, beta=0.3, label_smoothing=smoothing).loss.sum()

    ours = lambda h, w: token_log_probabilities(h, w, LABELS)  # noqa: E731
    found = jax.value_and_grad(loss, (1, 2))(ours, hidden, weight)
    close(found[1], jax.grad(loss, (1, 2))(whole, hidden, weight))
    chosen, rejected = whole(hidden, weight).sum(axis=1).reshape(2, PAIRS)
    margin = 0.3 * ((chosen - before[0]) - (rejected - before[1]))
    right, wrong = jnp.log1p(jnp.exp(-margin)), jnp.log1p(jnp.exp(margin))
    close(found[0], ((1 - smoothing) * right + smoothing * wrong).sum())
    slope = jax.grad(lambda c: dpo_loss(c, rejected, *before, beta=0.3, label_smoothing=smoothing).loss.sum())(chosen)
    close(slope, -0.3 * (jax.nn.sigmoid(-margin) - smoothing))
    rewards = dpo_loss(chosen, rejected, *before, beta=0.3)
    close((rewards.chosen_reward - rewards.rejected_reward), margin)


def test_dpo_far_from_the_reference() -> None:
    """The logarithm of a vanishing probability is finite."""
    one, far = jnp.zeros(1), jnp.full(1, 1e4)
    close(dpo_loss(one, far, one, one, beta=1.0).loss, [1e4])
    close(dpo_loss(far, one, one, one, beta=1.0).loss, [0.0])


@pytest.mark.parametrize("each", [False, True])
def test_grpo(each: bool) -> None:
    hidden, weight = arrays()
    advantages = np.linspace(-1, 1, 2 * PAIRS * TOKENS, dtype=np.float32).reshape(2 * PAIRS, TOKENS)
    advantages = advantages if each else advantages[:, 0]
    old, before = whole(0.9 * hidden, weight), whole(0.5 * hidden, weight)

    def loss(log_probabilities: Any, hidden: Any, weight: Any) -> Any:
        found = grpo_loss(
            log_probabilities(hidden, weight), jnp.asarray(advantages), old=old, reference=before, beta=0.1,
            clip=(0.2, 0.28),
        )  # fmt: skip
        return jnp.where(LABELS != -100, found, 0).sum()

    ours = lambda h, w: token_log_probabilities(h, w, LABELS)  # noqa: E731
    found = jax.value_and_grad(loss, (1, 2))(ours, hidden, weight)
    close(found[1], jax.grad(loss, (1, 2))(whole, hidden, weight))
    of_token = advantages if each else advantages[:, None]
    ratio = np.exp(whole(hidden, weight) - old)
    gained = np.where(of_token > 0, np.minimum(ratio, 1.28) * of_token, np.maximum(ratio, 0.8) * of_token)
    apart = before - whole(hidden, weight)
    wanted = -gained + 0.1 * (np.exp(apart) - apart - 1)
    close(found[0], np.where(LABELS != -100, wanted, 0).sum())


def test_grpo_on_policy_is_the_policy_gradient() -> None:
    given, advantages = jnp.log(jnp.array([[0.5, 0.1]])), jnp.array([3.0])
    close(jax.grad(lambda x: grpo_loss(x, advantages).sum())(given), jnp.array([[-3.0, -3.0]]))


def test_numbers_at_the_ends_of_their_ranges() -> None:
    chosen, rejected = jnp.array([2.0]), jnp.array([-1.0])
    half = dpo_loss(chosen, rejected, rejected, rejected, beta=1.0, label_smoothing=0.5).loss
    close(half, -0.5 * (jax.nn.log_sigmoid(3.0) + jax.nn.log_sigmoid(-3.0))[None])
    given, advantages = jnp.log(jnp.array([[0.5, 3.0]])), jnp.array([2.0])
    old = jnp.zeros((1, 2))
    close(grpo_loss(given, advantages, old=old, clip=(1, 0)), jnp.array([[-1.0, -2.0]]))
    close(grpo_loss(given, -advantages, old=old, clip=(0, 1)), jnp.array([[2.0, 6.0]]))


def test_no_gradient_has_the_logits() -> None:
    shapes = (4, 512, 8), (8, 32000)
    labels = jax.ShapeDtypeStruct((4, 512), jnp.int32)

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return grpo_loss(token_log_probabilities(hidden, weight, labels), jnp.ones(4)).sum()

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), labels)
    assert max(x.size for x in arrays_of(traced.jaxpr)) < 4 * 512 * 32000 // 8


def test_errors() -> None:
    one, two = jnp.zeros(1), jnp.zeros(2)
    with pytest.raises(ArgumentError, match=r"rejected = float32\[2\]"):
        dpo_loss(one, two, one, one)
    for name, value in (("beta", 0), ("beta", -1.0), ("beta", "1"), ("label_smoothing", 0.6)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ArgumentError, match=f"dpo_loss cannot take this {name}"):
            dpo_loss(one, one, one, one, **options)
    tokens = jnp.zeros((2, 3))
    with pytest.raises(ArgumentError, match=r"advantages = float32\[1\]"):
        grpo_loss(tokens, one)
    with pytest.raises(ArgumentError, match=r"old = float32\[2\]"):
        grpo_loss(tokens, two, old=two)
    with pytest.raises(ArgumentError, match="no reference to be near to"):
        grpo_loss(tokens, two, beta=0.1)
    for name, value in (("clip", -0.1), ("clip", (0.2, -1)), ("clip", (1.5, 0.2)), ("beta", -1)):
        options = {name: value}
        with pytest.raises(ArgumentError, match=f"grpo_loss cannot take this {name}"):
            grpo_loss(tokens, two, **options)
