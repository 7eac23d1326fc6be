"""Programs of several heads: each step of a chunk is taken for a stack of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.recurrences import columns_of, decays_of_heads

_STATES = 32 * 128 * 128
"""The most elements of the states of a program: with as many, the steps of 64 tokens take 14 MiB of vector memory."""


def heads_of_program(groups: int, heads: int, state: int) -> int:
    """The most heads of whole groups that divide all and whose states, of so many elements, fit; one if none do."""
    shared = heads // groups
    fits = (n * shared for n in range(1, groups + 1) if groups % n == 0 and n * shared * state <= _STATES)
    return max(fits, default=1)


def several(
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
    """The body of `gated_delta_rule_forward` for programs of several heads: all heads of some groups."""
    shared = value.shape[2] // query.shape[2]
    b = tk.parallel(value.shape[0])
    g = tk.parallel(query.shape[2], heads // shared)
    j = tk.parallel(value.shape[3], block_v)
    h = g * shared
    depth, wide = key.shape[3], tk.accumulator(value.dtype)

    products = partial(tk.dot, precision="bf16" if value.dtype == jnp.bfloat16 else None)

    def chunk(t: tk.Tile, states: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x.astype(wide), 0, 1) for x in (query[b, t, g], key[b, t, g], value[b, t, h, j]))
        turned = jnp.swapaxes(k, 1, 2)
        of_keys, of_queries = (repeated(products(x, turned), shared) for x in (k, q))
        q, k, turned = (repeated(x, shared) for x in (q, k, turned))
        rates = beta[b, t, h].astype(wide).T
        decays = decays_of_heads(t, log_decay[b, t, h].astype(wide).T, segment_ids, b)
        weights = decays.between * rates[:, None, :]
        earlier = t.indices[:, None] > t.indices[None, :]
        inverses = unit_lower_inverses(jnp.where(earlier, weights * of_keys, 0), value.dtype == jnp.bfloat16)

        before = columns_of(decays.before.T, block_v)
        added = products(inverses, v - products(k, states) * before)
        found = products(q, states) * before + products(weights * of_queries, added)
        out[b, t, h, j] = jnp.swapaxes(found, 0, 1).astype(out.dtype)
        kept = turned * (rates * decays.after)[:, None, :]
        return products(kept, added) + states * columns_of(decays.whole.T, block_v)

    start = tk.zeros((heads, depth, j), wide) if initial_state is None else initial_state[b, h, :, j].astype(wide)
    final_state[b, h, :, j] = tk.fold(tk.serial(value.shape[1], block_t), chunk, start)


def repeated(x: jax.Array, times: int) -> jax.Array:
    """Each matrix of a stack so many times."""
    return jnp.repeat(x, times, axis=0) if times > 1 else x
