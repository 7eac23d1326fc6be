"""Programs of several heads, with decays of channels: each step of a chunk is taken for a stack of heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.chunk_loop import StackChunk
from tilekern.kernels.gated_delta_rule.halves import halves
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.recurrences import bounded, columns_of, parts_of


def chunk_by_channel(
    beta: tk.Ref, log_decay: tk.Ref, segment_ids: tk.Ref | None, chunk: StackChunk, states: jax.Array
) -> jax.Array:
    """A step of `delta_rule_by_channel` for a stack: states [H, K, V] before a chunk -> states after the chunk."""
    (q, k, v), t = chunk.stacks(), chunk.t
    products, size = chunk.products, v.shape[1]
    q, k = chunk.repeated(q), chunk.repeated(k)
    rates = chunk.of_tokens(beta)[:, None, :]
    decays = bounded(t, chunk.of_tokens(log_decay), segment_ids, chunk.b, axis=1)
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
    added = products(unit_lower_inverses(a * rates, chunk.is_narrow), v - of_states[:, :size])
    outputs = of_states[:, size:] + products(scores * rates, added)
    weighted = jnp.swapaxes(k * after, 1, 2) * rates
    following = products(weighted, added) + states * columns_of(whole.T, v.shape[2])
    chunk.store(outputs)
    return following


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
