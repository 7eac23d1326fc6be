"""Programs of several heads: each step of a chunk is taken for a stack of heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.chunk_loop import StackChunk
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.recurrences import columns_of, decays_of_heads


def chunk_by_head(
    beta: tk.Ref, log_decay: tk.Ref, segment_ids: tk.Ref | None, chunk: StackChunk, states: jax.Array
) -> jax.Array:
    """A step of `gated_delta_rule_forward` for a stack: states [H, K, V] before a chunk -> states after the chunk."""
    (q, k, v), t = chunk.stacks(), chunk.t
    products, repeated, width = chunk.products, chunk.repeated, v.shape[2]
    turned = jnp.swapaxes(k, 1, 2)
    of_keys, of_queries = (repeated(products(x, turned)) for x in (k, q))
    q, k, turned = map(repeated, (q, k, turned))
    rates = chunk.of_tokens(beta)
    decays = decays_of_heads(t, chunk.of_tokens(log_decay), segment_ids, chunk.b)
    weights = decays.between * rates[:, None, :]
    earlier = t.indices[:, None] > t.indices[None, :]
    inverses = unit_lower_inverses(jnp.where(earlier, weights * of_keys, 0), chunk.is_narrow)

    before = columns_of(decays.before.T, width)
    added = products(inverses, v - products(k, states) * before)
    outputs = products(q, states) * before + products(weights * of_queries, added)
    weighted = turned * (rates * decays.after)[:, None, :]
    following = products(weighted, added) + states * columns_of(decays.whole.T, width)
    chunk.store(outputs)
    return following
