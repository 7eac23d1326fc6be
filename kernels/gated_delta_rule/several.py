"""Programs of several heads: each step of a chunk is taken for a stack of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.recurrences import columns_of, decays_of_heads


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
    depth, wide, narrow = key.shape[3], tk.accumulator(value.dtype), value.dtype

    def chunk(t: tk.Tile, states: jax.Array) -> jax.Array:
        q, k, v = (_by_head(x, wide) for x in (query[b, t, g], key[b, t, g], value[b, t, h, j]))
        turned = jnp.swapaxes(k, 1, 2)
        of_keys, of_queries = (_repeated(_products(x, turned), shared) for x in (k, q))
        q, k, turned = (_repeated(x, shared) for x in (q, k, turned))
        rates = beta[b, t, h].astype(wide).T
        decays = decays_of_heads(t, log_decay[b, t, h].astype(wide).T, segment_ids, b)
        weights = decays.between * rates[:, None, :]
        earlier = t.indices[:, None] > t.indices[None, :]
        inverses = unit_lower_inverses(jnp.where(earlier, weights * of_keys, 0), narrow.itemsize == 2)

        start, before = states.astype(narrow), columns_of(decays.before.T, block_v)
        missing = v.astype(wide) - _products(k, start) * before
        added = _products(inverses.astype(narrow), missing.astype(narrow)).astype(narrow)
        found = _products(q, start) * before + _products((weights * of_queries).astype(narrow), added)
        out[b, t, h, j] = jnp.swapaxes(found, 0, 1).astype(out.dtype)
        kept = (turned.astype(wide) * (rates * decays.after)[:, None, :]).astype(narrow)
        return _products(kept, added) + states * columns_of(decays.whole.T, block_v)

    start = tk.zeros((heads, depth, j), wide) if initial_state is None else initial_state[b, h, :, j].astype(wide)
    final_state[b, h, :, j] = tk.fold(tk.serial(value.shape[1], block_t), chunk, start)


def _by_head(x: jax.Array, wide: jax.typing.DTypeLike) -> jax.Array:
    """[C, H, K] as [H, C, K]; a TPU moves rows of 32-bit numbers."""
    return jnp.swapaxes(x.astype(wide), 0, 1).astype(x.dtype)


def _repeated(x: jax.Array, times: int) -> jax.Array:
    """Each matrix of a stack so many times."""
    return jnp.repeat(x, times, axis=0) if times > 1 else x


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    """The products of two stacks of matrices."""
    return jax.vmap(tk.dot)(x, y)
