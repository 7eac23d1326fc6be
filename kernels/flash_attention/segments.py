"""The begins and ends of segments of packed sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ranges(ids: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each of `ids` [B, T] the first place among `others` [B, S] with the same id, and the last one plus 1.

    (S, 0) where there is none. In O((T + S) log S), and memory of T + S.
    """

    def one(ids: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(others, stable=True)  # of equal ids, the first one comes first
        in_order = others[order]
        left, right = (jnp.searchsorted(in_order, ids, side=side) for side in ("left", "right"))
        known = left < right
        last = max(others.shape[0] - 1, 0)
        first, final = order[jnp.minimum(left, last)], order[jnp.clip(right - 1, 0, last)]
        return jnp.where(known, first, others.shape[0]), jnp.where(known, final + 1, 0)

    if not others.shape[1]:
        none = jnp.zeros(ids.shape, jnp.int32)
        return none, none
    first, stop = jax.vmap(one)(ids, others)
    return first.astype(jnp.int32), stop.astype(jnp.int32)
