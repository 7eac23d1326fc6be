"""Programs of several heads, with decays of channels: each step of a chunk is taken for a stack of heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.gated_delta_rule.halves import halves
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.gated_delta_rule.several import repeated
from tilekern.kernels.recurrences import columns_of, segments_of, truncated


def several_by_channel(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    beta: tk.Ref,
    log_decay: tk.Ref,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    block_t: int,
    block_v: int,
    heads: int,
) -> None:
    """The body of `delta_rule_by_channel` for programs of several heads: all heads of some groups."""
    shared = value.shape[2] // query.shape[2]
    b = tk.parallel(value.shape[0])
    g = tk.parallel(query.shape[2], heads // shared)
    j = tk.parallel(value.shape[3], block_v)
    h = g * shared
    depth, wide = key.shape[3], tk.accumulator(value.dtype)
    narrow = value.dtype == jnp.bfloat16
    products = partial(tk.dot, precision="bf16" if narrow else None)

    def chunk(t: tk.Tile, states: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x.astype(wide), 0, 1) for x in (query[b, t, g], key[b, t, g], value[b, t, h, j]))
        q, k = repeated(q, shared), repeated(k, shared)
        rates = beta[b, t, h].astype(wide).T[:, None, :]
        decays = jnp.maximum(jnp.swapaxes(log_decay[b, t, h].astype(wide), 0, 1), -750 if wide == jnp.float64 else -110)
        row, column = t.indices[:, None] - t.start, t.indices[None, :] - t.start
        levels = list(halves(row, column, block_t))
        before, after, *factors = _products_of_decays(decays, [column <= row, column > row, *(m for _, m in levels)])
        whole = jnp.exp(decays.sum(axis=1))

        scores = jnp.where(row == column, (q * k).sum(axis=2, keepdims=True), 0)
        a = jnp.zeros_like(scores)
        for (pairs, _), factor in zip(levels, factors, strict=True):
            decayed = k * factor
            found = products(jnp.concatenate([decayed, q * factor], axis=1), jnp.swapaxes(decayed, 1, 2))
            a, scores = (jnp.where(pairs, x, y) for x, y in ((found[:, :block_t], a), (found[:, block_t:], scores)))
        if segment_ids is not None:
            segments = segments_of(t, segment_ids, b)
            a, scores = (jnp.where(segments.same, x, 0) for x in (a, scores))
            before = jnp.where(segments.first[:, None], before, 0)
            after = jnp.where(segments.last[:, None], after, 0)
            whole = jnp.where(segments.whole, whole, 0)

        known = products(jnp.concatenate([k * before, q * before], axis=1), states)
        added = products(unit_lower_inverses(a * rates, narrow), v - known[:, :block_t])
        found = known[:, block_t:] + products(scores * rates, added)
        out[b, t, h, j] = jnp.swapaxes(found, 0, 1).astype(out.dtype)
        return products(jnp.swapaxes(k * after, 1, 2) * rates, added) + states * columns_of(whole.T, block_v)

    start = tk.zeros((heads, depth, j), wide) if initial_state is None else initial_state[b, h, :, j].astype(wide)
    final_state[b, h, :, j] = tk.fold(tk.serial(value.shape[1], block_t), chunk, start)


def _products_of_decays(decays: jax.Array, tokens: list[jax.Array]) -> list[jax.Array]:
    """exp of the sums of log decays [H, C, K] over the tokens in the rows of each mask [C, C]; [H, C, K] each."""
    size = decays.shape[1]
    sums = jnp.exp(_sums(decays, jnp.concatenate([jnp.where(m, 1, 0) for m in tokens]).astype(decays.dtype)))
    return [sums[:, n * size : (n + 1) * size] for n in range(len(tokens))]


def _sums(x: jax.Array, ones: jax.Array) -> jax.Array:
    """ones[M, C] times each x[C, K] of a stack; float32 is three parts of bfloat16, whose products are exact."""

    @jax.custom_jvp
    def sums(x: jax.Array, ones: jax.Array) -> jax.Array:
        if x.dtype != jnp.float32:
            return _times(ones, x, None)
        high = truncated(x)
        middle = truncated(x - high)
        parts = jnp.concatenate([high, middle, x - high - middle], axis=1)
        return _times(jnp.concatenate([ones] * 3, axis=1), parts, "bf16")

    @sums.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        """The sum is linear. Parts of bfloat16 would round what a backward pass gives them."""
        return sums(*primals), _times(primals[1], tangents[0], "bf16x6")

    return sums(x, ones)


def _times(x: jax.Array, y: jax.Array, precision: str | None) -> jax.Array:
    return tk.dot(jnp.broadcast_to(x, (y.shape[0], *x.shape)), y, precision=precision)
