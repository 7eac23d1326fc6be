"""The linear_attention kernel and its blocks.

Within a chunk of tokens, c_i is the sum of the log decays up to token i. The chunk form of the recurrence (Dao and Gu
2024, https://arxiv.org/abs/2405.21060, section 6) is

    out_i = exp(c_i) q_iᵀ S + Σ_{j ≤ i} exp(c_i - c_j) (q_i · k_j) v_j
    S'    = exp(c_last) S + Σ_j exp(c_last - c_j) k_j v_jᵀ

for the state S before the chunk and S' behind it: four matrix products a chunk. No exponent is positive, so that
nothing overflows. Tokens beyond the end read 0: they have no keys, and a log decay of 0 keeps the state.
"""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, takes_registers, tiled
from tilekern.kernels.chunk_loop import Arrays, Chunk, out_types, over_chunks
from tilekern.kernels.recurrences import decays_of


def _out_type(query: Any, key: Any, value: Any, *unused: Any) -> tuple[Any, Any]:
    return out_types(query, value)


@tk.kernel(out_type=_out_type)
def linear_attention_forward(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    log_decay: tk.Ref,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    *,
    block_t: tk.Block = 64,
    block_v: tk.Block = 128,
    sums_by_products: tk.Choice[bool] = False,
) -> None:
    """query, key[B, T, G, K], value[B, T, H, V], log_decay[B, T, H], initial_state[B, H, K, V] -> out, final_state.

    Head h reads the query and the key of head h // (H // G). The state is in float32 (float64 for float64); operands of
    products are in the dtype of the inputs. `segment_ids` is [B, T]. With `sums_by_products`
    log decays are added by products.
    """
    arrays = Arrays(query, key, value, initial_state, out, final_state)
    wide, narrow = arrays.wide, value.dtype

    def step(chunk: Chunk, state: jax.Array) -> jax.Array:
        q, k, v = chunk.query, chunk.key, chunk.value
        of_tokens = chunk.of_tokens(log_decay)
        decays = decays_of(chunk.t, of_tokens, segment_ids, chunk.b, by_products=sums_by_products)
        before = tk.dot(q, state.astype(narrow)) * decays.before[:, None]
        scores = (tk.dot(q, k.T) * decays.between).astype(narrow)
        chunk.store(tk.dot(scores, v, before))
        weighted = (v.astype(wide) * decays.after[:, None]).astype(narrow)
        return tk.dot(k.T, weighted, state * decays.whole)

    over_chunks(arrays, step, block_t=block_t, block_v=block_v)


@linear_attention_forward.schedule("cpu")
def _cpu(query: Any, key: Any, value: Any, log_decay: Any, initial_state: Any, segment_ids: Any) -> dict[str, int]:
    """Chunks of 32 tokens, whose scores cost less than their states; the columns of a state together."""
    return {"block_t": even(value.shape[1], 32), "block_v": even(value.shape[3], 256)}


@linear_attention_forward.schedule("cuda")
def _cuda(
    query: Any, key: Any, value: Any, log_decay: Any, initial_state: Any, segment_ids: Any, device: tk.Device
) -> dict[str, int]:
    """64 columns of the state in registers; 32 of float32, whose products of whole heads spill with any tiles.

    On GPUs with little shared memory 64 columns spill up to 80 bytes. On sm_100 two stages spill 20. On sm_90 one
    warpgroup multiplies all tokens of a chunk: by the static estimate of 8 sequences of 1024 tokens of Mamba-2, 48 µs,
    and 116 with two.
    """
    narrow = value.dtype.itemsize == 2
    fits = narrow and query.shape[3] <= 128
    alone = fits and device.matrix_unit == "wgmma" and segment_ids is None
    block_t = power_of_two(value.shape[1], 64 if narrow and not takes_registers(device) else 32, 16)
    block_v = 64 if narrow and device.fast_memory > 128 << 10 else 32
    return {
        "block_t": block_t,
        "block_v": power_of_two(value.shape[3], block_v, 16),
        "num_warps": 4 if alone else 8,
        "num_stages": 3 if fits and device.matrix_unit == "tcgen05" else 2,
    }


@linear_attention_forward.gradient_schedule("cuda")
def _cuda_gradient(query: Any, key: Any, value: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    """Chunks of 64 tokens where warpgroups, or tensor memory, multiply them, and 16 where registers hold the operands.

    By the static estimate of 8 sequences of 1024 tokens of Mamba-2 all kernels of the gradient take 346 µs on sm_90,
    and 573 in chunks of 16 tokens, which spill 76 bytes a thread where these spill 488.
    """
    fits = value.dtype.itemsize == 2 and query.shape[3] <= 128
    large = fits and device.matrix_unit in ("wgmma", "tcgen05")
    return {
        "block_t": power_of_two(value.shape[1], 64 if large else 16, 16),
        "block_v": power_of_two(value.shape[3], 32, 16),
        "num_warps": 8 if device.matrix_unit == "tcgen05" and large else 4,
    }


@linear_attention_forward.schedule("tpu")
def _tpu(query: Any, key: Any, value: Any, log_decay: Any, initial_state: Any, segment_ids: Any) -> dict[str, int]:
    """Chunks of 128 tokens, the size of a matrix unit."""
    return {
        "block_t": tiled(value.shape[1], 128, 8),
        "block_v": tiled(value.shape[3], 256, 128),
        "sums_by_products": True,
    }
