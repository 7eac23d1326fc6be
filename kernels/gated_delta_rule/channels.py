"""The gated delta rule with a decay for each channel of the key: Kimi delta attention.

The state is decayed row by row, S_t = Diag(a_t) S_{t-1} + …, so that decays stand between keys, channel by channel
(Kimi Team 2025, https://arxiv.org/abs/2510.26692, section 3):

    u_i = β_i (v_i - (k_i exp c_i)ᵀ S - Σ_{j < i} (Σ_d k_id k_jd exp(c_id - c_jd)) u_j)

A product of k_i exp(c_i) and k_j exp(-c_j) would overflow. So the pairs i > j are parted as the halves of blocks whose
size doubles from 2: each pair is in the lower and the upper half of one block. The decays from j to the middle of the
block, and from there to i, are at most 1. Each is the sum of the log decays between, and not a difference of sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.chunk_loop import Arrays, Chunk, heads_of_program, over_chunks, over_chunks_of_stacks
from tilekern.kernels.gated_delta_rule.halves import halves
from tilekern.kernels.gated_delta_rule.inverse import in_blocks, unit_lower_inverse
from tilekern.kernels.gated_delta_rule.kernel import out_type
from tilekern.kernels.gated_delta_rule.several_by_channel import chunk_by_channel
from tilekern.kernels.recurrences import bounded


@tk.kernel(out_type=out_type)
def delta_rule_by_channel(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    beta: tk.Ref,
    log_decay: tk.Ref,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    *,
    block_t: tk.Block = 32,
    block_v: tk.Block = 128,
    heads: tk.Block = 1,
) -> None:
    """As `gated_delta_rule_forward`, for log_decay[B, T, H, K]; operands of products are in the dtype of the inputs."""
    arrays = Arrays(query, key, value, initial_state, out, final_state)
    if heads > 1 and in_blocks(block_t):
        step_of_stack = partial(chunk_by_channel, beta, log_decay, segment_ids)
        over_chunks_of_stacks(arrays, step_of_stack, block_t=block_t, block_v=block_v, heads=heads)
        return
    wide, narrow = arrays.wide, value.dtype
    precision = "bf16x6" if narrow.itemsize == 2 else None

    def step(chunk: Chunk, state: jax.Array) -> jax.Array:
        q, k, v, t = chunk.query.astype(wide), chunk.key.astype(wide), chunk.value, chunk.t
        rate = chunk.of_tokens(beta)[:, None]
        decays = bounded(t, chunk.of_tokens(log_decay), segment_ids, chunk.b)

        def product_of_decays(tokens: jax.Array) -> jax.Array:
            """[C, K]: for each row of the mask tokens[C, C], exp of the sum of log decays over its tokens."""
            return jnp.exp(tk.dot(jnp.where(tokens, 1, 0).astype(wide), decays, precision=precision))

        row, column = t.indices[:, None] - t.start, t.indices[None, :] - t.start
        before, after = product_of_decays(column <= row), product_of_decays(column > row)
        whole = jnp.exp(decays.sum(axis=0))
        scores = jnp.where(row == column, (q * k).sum(axis=1)[:, None], 0)
        a = jnp.zeros_like(scores)
        for pairs, tokens in halves(row, column, block_t):
            factors = product_of_decays(tokens)
            decayed = (k * factors).astype(narrow)
            a = jnp.where(pairs, tk.dot(decayed, decayed.T), a)
            scores = jnp.where(pairs, tk.dot((q * factors).astype(narrow), decayed.T), scores)
        start = state.astype(narrow)
        missing = v.astype(wide) - tk.dot((k * before).astype(narrow), start)
        inverse = unit_lower_inverse(rate * a, precision)
        added = tk.dot(inverse, rate * missing, precision=precision).astype(narrow)
        of_state = tk.dot((q * before).astype(narrow), start)
        chunk.store(tk.dot(scores.astype(narrow), added, of_state))
        return tk.dot((k * after).astype(narrow).T, added, state * whole[:, None])

    over_chunks(arrays, step, block_t=block_t, block_v=block_v)


@delta_rule_by_channel.schedule("cpu")
def _cpu(
    query: Any, key: Any, value: Any, beta: Any, log_decay: Any, initial_state: Any, segment_ids: Any
) -> dict[str, int]:
    """Chunks of 32 tokens: their five levels and their inverse cost less than their products with the state."""
    return {"block_t": even(value.shape[1], 32), "block_v": even(value.shape[3], 256)}


@delta_rule_by_channel.schedule("cuda")
def _cuda(
    query: Any, key: Any, value: Any, beta: Any, log_decay: Any, initial_state: Any, segment_ids: Any
) -> dict[str, int]:
    """Chunks of 16 tokens, which spill least."""
    return {"block_t": 16, "block_v": power_of_two(value.shape[3], 32, 16), "num_warps": 8}


@delta_rule_by_channel.gradient_schedule("cuda")
def _cuda_gradient(query: Any, key: Any, value: Any, *unused: Any) -> dict[str, int]:
    """Eight warps: for heads of 128 on sm_90 the backward kernel spills 876 bytes, in four warps 3420."""
    return {"block_t": 16, "block_v": power_of_two(value.shape[3], 32, 16), "num_warps": 8}


@delta_rule_by_channel.schedule("tpu")
def _tpu(
    query: Any, key: Any, value: Any, beta: Any, log_decay: Any, initial_state: Any, segment_ids: Any
) -> dict[str, int]:
    """Chunks of 32 tokens of several heads: one level of products less than chunks of 64."""
    tokens, heads, width = value.shape[1:]
    block_v = tiled(width, 256, 128)
    together = heads_of_program(query.shape[2], heads, query.shape[3] * block_v)
    block_t = power_of_two(tokens, 32, 8) if together > 1 else tiled(tokens, 32, 8)
    return {"block_t": block_t, "block_v": block_v, "heads": together}
