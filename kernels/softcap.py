"""The softcap, a smooth bound of scores: softcap tanh(scores / softcap)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softcapped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """softcap tanh(scores / softcap), of the shape and dtype of the scores; the scores themselves for None."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def softcap_cotangent(cotangent: jax.Array, capped: jax.Array, softcap: float | None) -> jax.Array:
    """The cotangent of scores, from that of `capped = softcapped(scores, softcap)`.

    With c the softcap: d/ds c tanh(s / c) = 1 - tanh(s / c)² = 1 - (capped / c)².
    """
    return cotangent if softcap is None else cotangent * (1 - (capped / softcap) * (capped / softcap))
