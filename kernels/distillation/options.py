"""Divergences of a student's distribution q from a teacher's p, word by word, from their logarithms.

    forward KL: Σ p (ln p - ln q)
    reverse KL: Σ q (ln q - ln p)
    Jensen-Shannon: Σ β p (ln p - ln m) + (1 - β) q (ln q - ln m),  m = β p + (1 - β) q

Source of the generalised Jensen-Shannon divergence: Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 2. A
word with p = 0 adds nothing to a sum with the factor p; likewise for q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


@dataclass(frozen=True)
class Options:
    """The static arguments of the kernels except for blocks."""

    divergence: Divergence
    teacher_share: float
    temperature: float
    softcap: float | None
    teacher_softcap: float | None

    def shares(self, log_q: jax.Array, log_p: jax.Array) -> jax.Array:
        """Each word's share of the divergence, of the shape of log_q and log_p."""
        if self.divergence == "forward_kl":
            return weighted(log_p, log_p - log_q)
        if self.divergence == "reverse_kl":
            return weighted(log_q, log_q - log_p)
        log_m = self._log_mixture(log_q, log_p)
        share = self.teacher_share
        return share * weighted(log_p, log_p - log_m) + (1 - share) * weighted(log_q, log_q - log_m)

    def slopes(self, log_q: jax.Array, log_p: jax.Array) -> jax.Array:
        """φ: the derivative of each word's share along ln q, up to a constant times q.

        With the sum Φ of the slopes φ of all words, the derivative of the divergence along a logit is φ - q Φ. The
        constant cancels out.
        """
        if self.divergence == "forward_kl":
            return -jnp.exp(log_p)
        if self.divergence == "reverse_kl":
            return weighted(log_q, log_q - log_p)
        return (1 - self.teacher_share) * weighted(log_q, log_q - self._log_mixture(log_q, log_p))

    def _log_mixture(self, log_q: jax.Array, log_p: jax.Array) -> jax.Array:
        a, b = log_p + math.log(self.teacher_share), log_q + math.log1p(-self.teacher_share)
        high, low = jnp.maximum(a, b), jnp.minimum(a, b)
        return high + jnp.log1p(jnp.exp(jnp.where(high == -jnp.inf, -jnp.inf, low - high)))


def weighted(log_weight: jax.Array, x: jax.Array) -> jax.Array:
    """exp(log_weight) x, or 0 where the weight is 0, with all derivatives."""
    weight = jnp.exp(log_weight)
    return weight * jnp.where(weight > 0, x, 0)
