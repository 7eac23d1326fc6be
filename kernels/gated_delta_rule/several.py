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
    precision = "bf16x3" if narrow.itemsize == 2 else None

    def chunk(t: tk.Tile, states: jax.Array) -> jax.Array:
        q, k = _by_head(query[b, t, g], wide), _by_head(key[b, t, g], wide)
        of_keys, of_queries = (_repeated(_products(x, jnp.swapaxes(k, 1, 2)), shared) for x in (k, q))
        q, k, v = _repeated(q, shared), _repeated(k, shared), _by_head(value[b, t, h, j], wide)
        rates = beta[b, t, h].astype(wide)
        decays = decays_of_heads(t, log_decay[b, t, h].astype(wide).T, segment_ids, b)
        before, after, whole = (x.T for x in (decays.before, decays.after, decays.whole))
        earlier = t.indices[:, None] > t.indices[None, :]
        a = jnp.where(earlier, columns_of(rates, block_t) * decays.between * of_keys, 0)
        inverses = unit_lower_inverses(a, precision)

        start = states.astype(narrow)
        known = _products(k, start) * columns_of(before, block_v)
        missing = columns_of(rates, block_v) * (v.astype(wide) - known)
        added = _products(inverses, missing, precision).astype(narrow)
        found = _products(q, start) * columns_of(before, block_v)
        found += _products((of_queries * decays.between).astype(narrow), added)
        out[b, t, h, j] = jnp.swapaxes(found, 0, 1).astype(out.dtype)
        kept = (k.astype(wide) * columns_of(after, depth)).astype(narrow)
        return _products(jnp.swapaxes(kept, 1, 2), added) + states * columns_of(whole, block_v)

    start = tk.zeros((heads, depth, j), wide) if initial_state is None else initial_state[b, h, :, j].astype(wide)
    final_state[b, h, :, j] = tk.fold(tk.serial(value.shape[1], block_t), chunk, start)


def _by_head(x: jax.Array, wide: jax.typing.DTypeLike) -> jax.Array:
    """[C, H, K] as [H, C, K]; a TPU moves rows of 32-bit numbers."""
    return jnp.swapaxes(x.astype(wide), 0, 1).astype(x.dtype)


def _repeated(x: jax.Array, times: int) -> jax.Array:
    """Each matrix of a stack so many times."""
    return jnp.repeat(x, times, axis=0) if times > 1 else x


def _products(x: jax.Array, y: jax.Array, precision: str | None = None) -> jax.Array:
    """The products of two stacks of matrices."""
    return jax.vmap(lambda x, y: tk.dot(x, y, precision=precision))(x, y)
