"""Programs of several heads, with decays of channels: each step of a chunk is taken for a stack of heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.gated_delta_rule.halves import halves
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.gated_delta_rule.several import Heads
from tilekern.kernels.recurrences import bounded, columns_of, parts_of


def chunk_by_channel(
    beta: tk.Ref,
    log_decay: tk.Ref,
    segment_ids: tk.Ref | None,
    of: Heads,
    t: tk.Tile,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    states: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A chunk of `delta_rule_by_channel`: (outputs [H, C, V], next states [H, K, V])."""
    products, wide, size = of.products, v.dtype, v.shape[1]
    q, k = of.repeated(q), of.repeated(k)
    rates = beta[of.b, t, of.tile].astype(wide).T[:, None, :]
    decays = jnp.swapaxes(log_decay[of.b, t, of.tile].astype(wide), 0, 1)
    decays = bounded(t, decays, segment_ids, of.b, axis=1)
    row, column = t.indices[:, None] - t.start, t.indices[None, :] - t.start
    levels = list(halves(row, column, size))
    before, after, *factors = _products_of_decays(decays, [column <= row, column > row, *(m for _, m in levels)])
    whole = jnp.exp(decays.sum(axis=1))

    scores = jnp.where(row == column, (q * k).sum(axis=2, keepdims=True), 0)
    a = jnp.zeros_like(scores)
    for (pairs, _), factor in zip(levels, factors, strict=True):
        decayed = k * factor
        rows = products(jnp.concatenate([decayed, q * factor], axis=1), jnp.swapaxes(decayed, 1, 2))
        a, scores = (jnp.where(pairs, x, y) for x, y in ((rows[:, :size], a), (rows[:, size:], scores)))

    of_states = products(jnp.concatenate([k * before, q * before], axis=1), states)
    added = products(unit_lower_inverses(a * rates, of.narrow), v - of_states[:, :size])
    outputs = of_states[:, size:] + products(scores * rates, added)
    weighted = jnp.swapaxes(k * after, 1, 2) * rates
    return outputs, products(weighted, added) + states * columns_of(whole.T, v.shape[2])


def _products_of_decays(decays: jax.Array, tokens: list[jax.Array]) -> list[jax.Array]:
    """exp of the sums of log decays [H, C, K] over the tokens in the rows of each mask [C, C]; [H, C, K] each."""
    size = decays.shape[1]
    sums = jnp.exp(_sums(decays, jnp.concatenate([jnp.where(m, 1, 0) for m in tokens]).astype(decays.dtype)))
    return [sums[:, n * size : (n + 1) * size] for n in range(len(tokens))]


def _sums(x: jax.Array, masks: jax.Array) -> jax.Array:
    """masks[M, C] @ x[C, K] for each x of a stack; float32 is three parts of bfloat16, whose products are exact."""

    @jax.custom_jvp
    def sums(x: jax.Array, masks: jax.Array) -> jax.Array:
        if x.dtype != jnp.float32:
            return _times(masks, x, None)
        return _times(jnp.concatenate([masks] * 3, axis=1), jnp.concatenate(parts_of(x), axis=1), "bf16")

    @sums.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        """The sum is linear. Parts of bfloat16 would round the cotangents of a backward pass."""
        return sums(*primals), _times(primals[1], tangents[0], "bf16x6")

    return sums(x, masks)


def _times(x: jax.Array, y: jax.Array, precision: str | None) -> jax.Array:
    return tk.dot(jnp.broadcast_to(x, (y.shape[0], *x.shape)), y, precision=precision)
