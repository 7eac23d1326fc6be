"""The gated_delta_rule kernel and its blocks.

Let S be the state before a chunk of tokens, c_i the sum of log decays up to token i, and u_i the vector that token i
adds to the state with its key. The rule is linear in all u (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section
3.3):

    u_i = β_i (v_i - exp(c_i) Sᵀ k_i - Σ_{j < i} exp(c_i - c_j) (k_i · k_j) u_j)

With the strictly lower triangular A_ij = β_i exp(c_i - c_j) (k_i · k_j) this is (I + A) U = B (V - exp(c) K S). All
else is linear attention with U for the values. `inverse.py` computes the inverse of I + A.

A chunk is a chain of products that wait for each other. Where programs run in sequence, as on TPUs, a program has
several heads, and takes each step for all its heads: the chain of one head fills the wait of another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.chunk_loop import (
    Arrays,
    Chunk,
    heads_of_program,
    out_types,
    over_chunks,
    over_chunks_of_stacks,
)
from tilekern.kernels.gated_delta_rule.inverse import in_blocks, unit_lower_inverse
from tilekern.kernels.gated_delta_rule.several import chunk_by_head
from tilekern.kernels.recurrences import decays_of


def out_type(query: Any, key: Any, value: Any, *unused: Any) -> tuple[Any, Any]:
    """The types of the outputs, and of the last state, in float32 (float64 for float64)."""
    return out_types(query, value)


@tk.kernel(out_type=out_type)
def gated_delta_rule_forward(
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
    block_t: tk.Block = 64,
    block_v: tk.Block = 128,
    heads: tk.Block = 1,
    sums_by_products: tk.Choice[bool] = False,
) -> None:
    """query, key[B, T, G, K], value[B, T, H, V], beta, log_decay[B, T, H], initial_state[B, H, K, V] -> two results.

    Head h reads the query and the key of head h // (H // G). The state, A and U are in float32 (float64 for float64);
    operands of the other products are in the dtype of the inputs. `segment_ids` is [B, T]. A program has one head, or
    `heads` heads of whole groups if `block_t` is a power of two of at least 8. With `sums_by_products`
    log decays of a single head are added by products.
    """
    arrays = Arrays(query, key, value, initial_state, out, final_state)
    if heads > 1 and in_blocks(block_t):
        step_of_stack = partial(chunk_by_head, beta, log_decay, segment_ids)
        over_chunks_of_stacks(arrays, step_of_stack, block_t=block_t, block_v=block_v, heads=heads)
        return
    wide, narrow = arrays.wide, value.dtype
    precision = "bf16x6" if narrow.itemsize == 2 else None

    def step(chunk: Chunk, state: jax.Array) -> jax.Array:
        q, k, v, t = chunk.query, chunk.key, chunk.value, chunk.t
        rate = chunk.of_tokens(beta)[:, None]
        decays = decays_of(t, chunk.of_tokens(log_decay), segment_ids, chunk.b, by_products=sums_by_products)
        earlier = t.indices[:, None] > t.indices[None, :]
        a = jnp.where(earlier, rate * decays.between * tk.dot(k, k.T), 0)
        recalled = tk.dot(k, state.astype(narrow)) * decays.before[:, None]
        added = tk.dot(unit_lower_inverse(a, precision), rate * (v.astype(wide) - recalled), precision=precision)
        before = tk.dot(q, state.astype(narrow)) * decays.before[:, None]
        scores = (tk.dot(q, k.T) * decays.between).astype(narrow)
        chunk.store(tk.dot(scores, added.astype(narrow), before))
        stored = (added * decays.after[:, None]).astype(narrow)
        return tk.dot(k.T, stored, state * decays.whole)

    over_chunks(arrays, step, block_t=block_t, block_v=block_v)


@gated_delta_rule_forward.schedule("cpu")
def _cpu(
    query: Any, key: Any, value: Any, beta: Any, log_decay: Any, initial_state: Any, segment_ids: Any
) -> dict[str, int]:
    """Chunks of 32 tokens: their inverse costs less than their products with the state."""
    return {"block_t": even(value.shape[1], 32), "block_v": even(value.shape[3], 256)}


@gated_delta_rule_forward.schedule("cuda")
def _cuda(
    query: Any,
    key: Any,
    value: Any,
    beta: Any,
    log_decay: Any,
    initial_state: Any,
    segment_ids: Any,
    device: tk.Device,
) -> dict[str, int]:
    """Chunks of 16 tokens, which spill least: the inverse and its operands are in registers, in float32.

    Four warps, where their registers suffice: by the static estimate of Qwen3-Next, 512 tokens, on sm_90 99 µs, and 121
    in eight.
    """
    few = value.dtype.itemsize == 2 and device.matrix_unit == "wgmma" and query.shape[3] <= 128 and segment_ids is None
    return {"block_t": 16, "block_v": power_of_two(value.shape[3], 32, 16), "num_warps": 4 if few else 8}


@gated_delta_rule_forward.gradient_schedule("cuda")
def _cuda_gradient(query: Any, key: Any, value: Any, *unused: Any) -> dict[str, int]:
    """The chunks of the kernel, in four warps.

    By the static estimate of Qwen3-Next, 512 tokens, the backward kernel takes 256 µs on sm_90 and spills 368 bytes a
    thread, and in eight warps 304 and 128.
    """
    return {"block_t": 16, "block_v": power_of_two(value.shape[3], 32, 16), "num_warps": 4}


@gated_delta_rule_forward.schedule("tpu")
def _tpu(
    query: Any, key: Any, value: Any, beta: Any, log_decay: Any, initial_state: Any, segment_ids: Any
) -> dict[str, int]:
    """Chunks of 64 tokens of several heads: their products fill the matrix units, while a single head would wait."""
    tokens, heads, width = value.shape[1:]
    block_v = tiled(width, 256, 128)
    together = heads_of_program(query.shape[2], heads, query.shape[3] * block_v)
    block_t = power_of_two(tokens, 64, 8) if together > 1 else tiled(tokens, 64, 8)
    return {"block_t": block_t, "block_v": block_v, "heads": together, "sums_by_products": True}
