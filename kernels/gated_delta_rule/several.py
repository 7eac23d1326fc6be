"""Programs of several heads: each step of a chunk is taken for a stack of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverses
from tilekern.kernels.recurrences import columns_of, decays_of_heads

_STATES = 32 * 128 * 128
"""The most elements of the states of a program: with as many, the steps of 64 tokens take 14 MiB of vector memory."""


class Heads(NamedTuple):
    """The heads of a program: all heads of some groups.

    Attributes:
      b: the number of the sequence.
      tile: the numbers of the heads.
      shared: heads of a group.
      narrow: True if the values are bfloat16.
    """

    b: jax.Array
    tile: tk.Tile
    shared: int
    narrow: bool

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The products of two stacks in the accumulator's dtype, with operands rounded to the dtype of the values."""
        return tk.dot(x, y, precision="bf16" if self.narrow else None)

    def repeated(self, x: jax.Array) -> jax.Array:
        """Each group's matrix of a stack for each of its heads."""
        return jnp.repeat(x, self.shared, axis=0) if self.shared > 1 else x


Chunk = Callable[[Heads, tk.Tile, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(heads, tokens, queries and keys [G, C, K], values [H, C, V], states [H, K, V]) -> outputs [H, C, V], next states."""


def heads_of_program(groups: int, heads: int, state: int) -> int:
    """The largest number of heads of whole groups that divides `heads` and whose states fit; 1 if none fits.

    `state` is the number of elements of a head's state.
    """
    shared = heads // groups
    fits = (n * shared for n in range(1, groups + 1) if groups % n == 0 and n * shared * state <= _STATES)
    return max(fits, default=1)


def over_stacks(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    initial_state: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    chunk: Chunk,
    *,
    block_t: int,
    block_v: int,
    heads: int,
) -> None:
    """The body of a kernel whose programs have `heads` heads. `chunk` gets arrays in the accumulator's dtype."""
    shared = value.shape[2] // query.shape[2]
    b = tk.parallel(value.shape[0])
    g = tk.parallel(query.shape[2], heads // shared)
    j = tk.parallel(value.shape[3], block_v)
    h = g * shared
    depth, wide = key.shape[3], tk.accumulator(value.dtype)
    of = Heads(b, h, shared, value.dtype == jnp.bfloat16)

    def step(t: tk.Tile, states: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x.astype(wide), 0, 1) for x in (query[b, t, g], key[b, t, g], value[b, t, h, j]))
        outputs, following = chunk(of, t, q, k, v, states)
        out[b, t, h, j] = jnp.swapaxes(outputs, 0, 1).astype(out.dtype)
        return following

    start = tk.zeros((heads, depth, j), wide) if initial_state is None else initial_state[b, h, :, j].astype(wide)
    final_state[b, h, :, j] = tk.fold(tk.serial(value.shape[1], block_t), step, start)


def chunk_by_head(
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
    """A chunk of `gated_delta_rule_forward`: (outputs [H, C, V], next states [H, K, V])."""
    products, repeated, wide, width = of.products, of.repeated, v.dtype, v.shape[2]
    turned = jnp.swapaxes(k, 1, 2)
    of_keys, of_queries = (repeated(products(x, turned)) for x in (k, q))
    q, k, turned = map(repeated, (q, k, turned))
    rates = beta[of.b, t, of.tile].astype(wide).T
    decays = decays_of_heads(t, log_decay[of.b, t, of.tile].astype(wide).T, segment_ids, of.b)
    weights = decays.between * rates[:, None, :]
    earlier = t.indices[:, None] > t.indices[None, :]
    inverses = unit_lower_inverses(jnp.where(earlier, weights * of_keys, 0), of.narrow)

    before = columns_of(decays.before.T, width)
    added = products(inverses, v - products(k, states) * before)
    outputs = products(q, states) * before + products(weights * of_queries, added)
    weighted = turned * (rates * decays.after)[:, None, :]
    return outputs, products(weighted, added) + states * columns_of(decays.whole.T, width)
