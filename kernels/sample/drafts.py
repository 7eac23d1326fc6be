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
    logarithms: jax.Array, drafts: jax.Array, keys: jax.Array, draft_logits: jax.Array | None, lens: jax.Array, **blocks: Any
) -> tuple[jax.Array, jax.Array]:
    """The tokens int32[B, K + 1] of `verify_drafts`, and their numbers int32[B].

    `logarithms` is float32[B, K + 1, V], of `drawable_logits`; drafts int32[B, K], lens int32[B] from 0 to K. A row's draft k is
    accepted by the bits of its coordinate 2^31 + k, which are those of no token.
    """
    rows, places, vocabulary = logarithms.shape
    p = jax.nn.softmax(logarithms, axis=-1)
    q = None if draft_logits is None else jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)
    number = jnp.arange(places - 1, dtype=jnp.int32)

    def bits_of(key: jax.Array) -> jax.Array:
        return tk.random_bits(key, number.astype(jnp.uint32) + jnp.uint32(1 << 31))

    words = jax.vmap(bits_of)(keys)
    uniform = (words >> 8).astype(jnp.float32) * 2.0**-24
    accepted = uniform * _of_drafts(q, drafts) < _of_drafts(p[:, :-1], drafts)
    accepted = jnp.cumprod(accepted & (number < lens[:, None]), axis=1, dtype=jnp.int32)
    count = accepted.sum(axis=1)

    at = jnp.take_along_axis(p, count[:, None, None], axis=1)[:, 0]
    rest = jnp.maximum(at - _of_place(q, drafts, count, vocabulary), 0)
    # Behind the last draft there is no q. Where p <= q everywhere but for rounding, p and q are equal.
    rest = jnp.where(((count == lens) | (rest.max(axis=1) == 0))[:, None], at, rest)
    rates = Rates(jnp.full(rows, 2.0**UNIT / jnp.log(2.0), jnp.float32))
    token = sampled_tokens(jnp.log(rest), keys, rates, None, **blocks)

    place = jnp.arange(places, dtype=jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    last = jnp.where(place == count[:, None], token[:, None], -1)
    return jnp.where(place < count[:, None], padded, last), count + 1


def _of_drafts(probabilities: jax.Array | None, drafts: jax.Array) -> jax.Array:
    """[B, K], the probabilities [B, K, V] of the drafts; 0 for a token outside of the vocabulary; 1 for None."""
    if probabilities is None:
        return jnp.ones(drafts.shape, jnp.float32)
    inside = (drafts >= 0) & (drafts < probabilities.shape[2])
    found = jnp.take_along_axis(probabilities, jnp.where(inside, drafts, 0)[..., None], axis=2)[..., 0]
    return jnp.where(inside, found, 0)


def _of_place(q: jax.Array | None, drafts: jax.Array, count: jax.Array, vocabulary: int) -> jax.Array:
    """float32[B, V], what draft `count` of each row was drawn from; of the last draft where there are no more."""
    if drafts.shape[1] == 0:
        return jnp.zeros((drafts.shape[0], vocabulary), jnp.float32)
    place = jnp.minimum(count, drafts.shape[1] - 1)[:, None]
    if q is None:
        return jax.nn.one_hot(jnp.take_along_axis(drafts, place, axis=1)[:, 0], vocabulary, dtype=jnp.float32)
    return jnp.take_along_axis(q, place[..., None], axis=1)[:, 0]
