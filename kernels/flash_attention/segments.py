"""The begins and ends of segments of packed sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ranges(ids: jax.Array, sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first, stop), int32[B, T]: for each of `ids` [B, T] the first index in `sequence` [B, S], and the last plus 1.

    (S, 0) for an id that `sequence` lacks. The time is O((T + S) log S), the memory O(T + S).
    Example: ids [[1, 2]], sequence [[1, 1, 3]] -> first [[0, 3]], stop [[2, 0]].
    """

    def of_sequence(ids: jax.Array, sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(sequence, stable=True)  # of equal ids, the first one comes first
        in_order = sequence[order]
        left, right = (jnp.searchsorted(in_order, ids, side=side) for side in ("left", "right"))
        present = left < right
        last = max(sequence.shape[0] - 1, 0)
        first, final = order[jnp.minimum(left, last)], order[jnp.clip(right - 1, 0, last)]
        return jnp.where(present, first, sequence.shape[0]), jnp.where(present, final + 1, 0)

    if not sequence.shape[1]:
        none = jnp.zeros(ids.shape, jnp.int32)
        return none, none
    first, stop = jax.vmap(of_sequence)(ids, sequence)
    return first.astype(jnp.int32), stop.astype(jnp.int32)
