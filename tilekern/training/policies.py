"""Losses of policies on the log probabilities of tokens, by `cross_entropy`, without logits in memory."""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, lies_in, refusal, require
from tilekern.kernels.cross_entropy import cross_entropy

hide_frames(__file__)

_LARGEST = sys.float_info.max


@takes_python_numbers
def token_log_probabilities(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    target: str | None = None,
) -> jax.Array:
    """The log probability of each token's label under softmax(hidden @ weight / temperature).

    It has derivatives of any order, and never logits in memory. It is the negative of the loss of
    `tilekern.kernels.cross_entropy.cross_entropy`.

    Args:
      hidden: [*B, D], float32, bfloat16, float16 or float64.
      weight: [D, V] of the same dtype.
      labels: integers [*B] in [0, V), the tokens that follow, or `ignore_index`. Any other label gives NaN.
      ignore_index: tokens with this label, such as prompts and padding, have the log probability 0 and no gradient.
      softcap: if given, logits become softcap * tanh(logits / softcap) first.
      temperature: logits are divided by it.
      target: lower for this target, e.g. "cpu:xla".

    Returns:
      [*B] in float32 (float64 for float64 inputs), natural logarithms.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tilekern.training import token_log_probabilities
      >>> log_p = token_log_probabilities(jnp.ones((1, 3, 8)), jnp.zeros((8, 1000)), jnp.array([[7, 999, -100]]))
      >>> log_p.sum(axis=1)  # of the sequence: -2 ln 1000
      Array([-13.815511], dtype=float32)
    """
    loss = cross_entropy(
        hidden,
        weight,
        labels,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        target=target,
    )
    return -loss


class Preferences(NamedTuple):
    """The results of `dpo_loss`, [*B] each.

    Attributes:
      loss: of each pair.
      chosen_reward: β (chosen - reference_chosen), of the better answer, without a gradient.
      rejected_reward: of the worse answer. The model ranks a pair as people do if the chosen reward is greater.
    """

    loss: jax.Array
    chosen_reward: jax.Array
    rejected_reward: jax.Array


@takes_python_numbers
def dpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Preferences:
    """Direct preference optimisation, from log probabilities of pairs of answers.

    loss = -(1 - ε) ln σ(β Δ) - ε ln σ(-β Δ) with Δ = (chosen - reference_chosen) - (rejected - reference_rejected).
    Source: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7; with ε, the share of pairs that people
    ranked wrongly, Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.

    Args:
      chosen: [*B], the log probability of each better answer: sums of `token_log_probabilities` over its tokens; means,
        if answers of different lengths are to count alike.
      rejected: [*B], of each worse answer.
      reference_chosen: [*B], of the better answer under the model before training. A constant under differentiation.
      reference_rejected: [*B], of the worse answer under the model before training.
      beta: β, how much the model is held to the reference; a number above 0.
      label_smoothing: ε from 0 to 1/2.

    Returns:
      the loss and both rewards, [*B] each.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or numbers do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.training import dpo_loss, token_log_probabilities
      >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.zeros((8, 1000))  # a pair of answers of 4 tokens
      >>> labels = jnp.array([[7, 8, 9, -100], [3, 4, -100, -100]])
      >>> chosen, rejected = token_log_probabilities(hidden, weight, labels).sum(axis=1)
      >>> dpo_loss(chosen, rejected, chosen, rejected).loss  # ln 2: as likely as under the reference
      Array(0.6931472, dtype=float32)
    """
    arrays = {
        "chosen": chosen,
        "rejected": rejected,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
    }
    fits = all(map(is_float, arrays.values())) and len({x.shape for x in arrays.values()}) == 1
    require(
        fits,
        "dpo_loss",
        expected="float arrays [*B] of one shape, a log probability for each answer",
        fix="sum those of tokens: token_log_probabilities(...).sum(axis=-1)",
        **arrays,
    )
    if not lies_in(beta, 0, _LARGEST) or beta == 0:
        raise refusal("dpo_loss", "beta", "a number above 0", beta, "0.1 is usual")
    if not lies_in(label_smoothing, 0, 0.5):
        raise refusal("dpo_loss", "label_smoothing", "a number from 0 to 0.5", label_smoothing, "leave it out")
    for_chosen = beta * (chosen - jax.lax.stop_gradient(reference_chosen))
    for_rejected = beta * (rejected - jax.lax.stop_gradient(reference_rejected))
    margin = for_chosen - for_rejected
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin)
    if label_smoothing:
        loss = loss - label_smoothing * jax.nn.log_sigmoid(-margin)
    return Preferences(loss, *map(jax.lax.stop_gradient, (for_chosen, for_rejected)))


@takes_python_numbers
def grpo_loss(
    log_probabilities: jax.Array,
    advantages: jax.Array,
    *,
    old: jax.Array | None = None,
    reference: jax.Array | None = None,
    beta: float = 0.0,
    clip: float | tuple[float, float] = 0.2,
) -> jax.Array:
    """Group relative policy optimisation: the clipped loss of each token, and its distance to a reference.

    With r = exp(log_probabilities - old), loss = -min(r A, clip(r, 1 - ε₁, 1 + ε₂) A) + β (exp(d) - d - 1) with
    d = reference - log_probabilities. Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, equations 3 and 4;
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, clip with ε₂ = 0.28 above ε₁ = 0.2.

    Args:
      log_probabilities: [*B, T], of the tokens of sampled answers: `token_log_probabilities`.
      advantages: [*B], one for each answer, or [*B, T]: (reward - mean) / standard deviation in a group of answers to a
        question; a constant under differentiation.
      old: [*B, T], of the policy that sampled the answers. None: the policy has not changed, and r is 1 and has a
        gradient.
      reference: [*B, T], of the model before training; None leaves the distance out.
      beta: β, the factor of the distance; needs a `reference` unless it is 0.
      clip: ε, or the pair ε₁ in [0, 1] below and ε₂ ≥ 0 above.

    Returns:
      loss[*B, T] for each token. Average over the tokens of an answer and then over answers (GRPO), over all tokens
      (DAPO), or by a constant length (Dr. GRPO, https://arxiv.org/abs/2503.20783). Tokens of the prompt, with
      the label `ignore_index` of `token_log_probabilities`, have no gradient, but a loss: leave them out of the mean.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or numbers do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tilekern.training import grpo_loss, token_log_probabilities
      >>> rewards = jnp.array([1.0, 0.0, 0.0, 1.0])  # of four answers to a question
      >>> advantages = (rewards - rewards.mean()) / rewards.std()
      >>> hidden, weight, labels = jnp.ones((4, 5, 8)), jnp.zeros((8, 1000)), jnp.full((4, 5), 7)
      >>> loss = lambda h: grpo_loss(token_log_probabilities(h, weight, labels), advantages).mean()
      >>> jax.value_and_grad(loss)(hidden)[0]
      Array(0., dtype=float32)
    """
    arrays = {"log_probabilities": log_probabilities, "advantages": advantages}
    arrays |= {name: x for name, x in (("old", old), ("reference", reference)) if x is not None}
    fits = all(map(is_float, arrays.values())) and log_probabilities.ndim > 0
    fits = fits and all(x is None or x.shape == log_probabilities.shape for x in (old, reference))
    fits = fits and advantages.shape in (log_probabilities.shape, log_probabilities.shape[:-1])
    require(
        fits,
        "grpo_loss",
        expected="float arrays: log_probabilities, old and reference [*B, T], advantages [*B] or [*B, T]",
        fix="one advantage for each answer, or for each token",
        **arrays,
    )
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    if not lies_in(low, 0, 1) or not lies_in(high, 0, _LARGEST):
        raise refusal("grpo_loss", "clip", "a number from 0 to 1, or a pair of them", clip, "0.2 is usual")
    if not lies_in(beta, 0, _LARGEST):
        raise refusal("grpo_loss", "beta", "a number of at least 0", beta, "0 leaves the distance out")
    if beta and reference is None:
        raise ArgumentError(
            "grpo_loss has no reference to be near to",
            expected="reference[*B, T] where beta is not 0",
            got=f"beta = {beta}, reference = None",
            fix="give the log probabilities of the model before training, or leave beta out",
        )
    advantages = jax.lax.stop_gradient(advantages)
    if advantages.ndim < log_probabilities.ndim:
        advantages = advantages[..., None]
    ratio = jnp.exp(log_probabilities - jax.lax.stop_gradient(log_probabilities if old is None else old))
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    if beta and reference is not None:
        apart = jax.lax.stop_gradient(reference) - log_probabilities
        loss = loss + beta * (jnp.expm1(apart) - apart)
    return loss
