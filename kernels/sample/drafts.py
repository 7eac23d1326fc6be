"""Rejection sampling of drafts, between the kernels of `sample`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.sample.arguments import Rates
from tilekern.kernels.sample.fixed_point import UNIT
from tilekern.kernels.sample.kernel import sampled_tokens


def verified(
    logarithms: jax.Array,
    drafts: jax.Array,
    keys: jax.Array,
    draft_logits: jax.Array | None,
    lens: jax.Array,
    **blocks: Any,
) -> tuple[jax.Array, jax.Array]:
    """The tokens int32[B, K + 1] of `verify_drafts`, and their numbers int32[B].

    `logarithms` is float32[B, K + 1, V], of `drawable_logits`; drafts int32[B, K], lens int32[B] from 0 to K.
    """
    vocabulary, places = logarithms.shape[2], logarithms.shape[1]
    p = jax.nn.softmax(logarithms, axis=-1)
    q = None if draft_logits is None else jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)
    of_drafts = 1.0 if q is None else probabilities_of(q, drafts)
    accepted = uniforms(keys, places - 1) * of_drafts < probabilities_of(p[:, :-1], drafts)
    accepted = jnp.cumprod(accepted & (jnp.arange(places - 1) < lens[:, None]), axis=1, dtype=jnp.int32)
    count = accepted.sum(axis=1)

    at = jnp.take_along_axis(p, count[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(at - _of_place(draft_logits, drafts, count, vocabulary), 0)
    # Behind the last draft there is no q. Where p <= q everywhere but for rounding, p and q are equal.
    residual = jnp.where(((count == lens) | (residual.max(axis=1) == 0))[:, None], at, residual)
    token = drawn_of_weights(residual, keys, **blocks)

    place = jnp.arange(places, dtype=jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    last = jnp.where(place == count[:, None], token[:, None], -1)
    return jnp.where(place < count[:, None], padded, last), count + 1


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """float32[B, count] from 0 to 1, by coordinates 2^31 + k of each row's key, which no token has."""
    numbers = jnp.arange(count, dtype=jnp.uint32) + jnp.uint32(1 << 31)

    def bits_of(key: jax.Array) -> jax.Array:
        return tk.random_bits(key, numbers)

    return (jax.vmap(bits_of)(keys) >> 8).astype(jnp.float32) * 2.0**-24


def probabilities_of(probabilities: jax.Array, drafts: jax.Array) -> jax.Array:
    """[*B], the probabilities [*B, V] of the drafts [*B]; 0 for a token outside of the vocabulary."""
    inside = (drafts >= 0) & (drafts < probabilities.shape[-1])
    of_drafts = jnp.take_along_axis(probabilities, jnp.where(inside, drafts, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(inside, of_drafts, 0)


def drawn_from(draft_logits: jax.Array | None, drafts: jax.Array, vocabulary: int) -> jax.Array:
    """float32[B, V]: the probabilities that drafts [B] were drawn from: softmax of [B, V], or 1 for the draft alone."""
    if draft_logits is None:
        return jax.nn.one_hot(drafts, vocabulary, dtype=jnp.float32)
    return jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)


def drawn_of_weights(weights: jax.Array, keys: jax.Array, **blocks: Any) -> jax.Array:
    """int32[B]: a token for each row, drawn in proportion to weights float32[B, V]."""
    rates = Rates(jnp.full(weights.shape[0], 2.0**UNIT / jnp.log(2.0), jnp.float32))
    return sampled_tokens(jnp.log(weights), keys, rates, None, **blocks)


def _of_place(draft_logits: jax.Array | None, drafts: jax.Array, count: jax.Array, vocabulary: int) -> jax.Array:
    """float32[B, V], what draft `count` of each row was drawn from; of the last draft where there are no more."""
    if drafts.shape[1] == 0:
        return jnp.zeros((drafts.shape[0], vocabulary), jnp.float32)
    place = jnp.minimum(count, drafts.shape[1] - 1)[:, None]
    at = None if draft_logits is None else jnp.take_along_axis(draft_logits, place[..., None], axis=1)[:, 0]
    return drawn_from(at, jnp.take_along_axis(drafts, place, axis=1)[:, 0], vocabulary)
