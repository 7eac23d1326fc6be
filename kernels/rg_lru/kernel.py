"""The rg_lru kernel and its blocks.

A program computes some channels of one sequence, chunk after chunk. Within a chunk the recurrence is one
`tk.linear_scan`; the last row of a chunk is the carry. Tokens beyond the end have a decay of 1 and add nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.recurrences import begins_new_sequence


def _out_type(
    x: Any, input_gate: Any, recurrence_gate: Any, a_param: Any, initial_state: Any, segment_ids: Any
) -> tuple[Any, Any]:
    state = jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), tk.accumulator(x.dtype))
    return jax.ShapeDtypeStruct(x.shape, x.dtype), state


@tk.kernel(out_type=_out_type)
def rg_lru_forward(
    x: tk.Ref,
    input_gate: tk.Ref,
    recurrence_gate: tk.Ref,
    a_param: tk.Ref,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    *,
    exponent: float = 8.0,
    scale_first: bool = True,
    block_t: tk.Block = 64,
    block_c: tk.Block = 128,
) -> None:
    """x, both gates[B, T, C], a_param[C], initial_state[B, C], segment_ids[B, T] -> out[B, T, C], final_state[B, C].

    Computed in float32 (float64 for float64).
    """
    b = tk.parallel(x.shape[0])
    j = tk.parallel(x.shape[2], block_c)
    wide = tk.accumulator(x.dtype)
    rate = -exponent * jax.nn.softplus(a_param[j].astype(wide))[None, :]

    def chunk(t: tk.Tile, state: jax.Array) -> jax.Array:
        log_a = jnp.where(t.valid[:, None], rate * jax.nn.sigmoid(recurrence_gate[b, t, j].astype(wide)), 0)
        square = -jnp.expm1(2 * log_a)
        factor = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
        decays = jnp.exp(log_a)
        first = begins_new_sequence(t, segment_ids, b)
        if first is not None:
            decays = jnp.where(first[:, None], 0, decays)
        if not scale_first:
            begins = t.indices == 0 if initial_state is None else None
            begins = first if begins is None else begins if first is None else begins | first
            factor = factor if begins is None else jnp.where(begins[:, None], 1, factor)
        added = factor * jax.nn.sigmoid(input_gate[b, t, j].astype(wide)) * x[b, t, j].astype(wide)
        rows = jax.lax.broadcasted_iota(jnp.int32, added.shape, 0)
        states = tk.linear_scan(decays, jnp.where(rows == 0, decays * state[None, :] + added, added))
        out[b, t, j] = states.astype(out.dtype)
        return jnp.where(rows == block_t - 1, states, 0).sum(axis=0)

    start = tk.zeros(j, wide) if initial_state is None else initial_state[b, j].astype(wide)
    final_state[b, j] = tk.fold(tk.serial(x.shape[1], block_t), chunk, start)


@rg_lru_forward.schedule("cpu")
def _cpu(x: Any, *unused: Any) -> dict[str, int]:
    """Tiles of 8 KiB as float32, which stay in the first cache."""
    return {"block_t": even(x.shape[1], 32), "block_c": even(x.shape[2], 64)}


@rg_lru_forward.schedule("cuda")
def _cuda(x: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    """128 tokens, or 64 on GPUs of less shared memory and on Blackwell; of 16 channels, or 32 with 64 tokens; 4 warps.

    Chunks follow each other, and many programs of few channels hide each other's latency.

    By the static estimate of 4 sequences of 512 tokens, 2560 channels, on sm_90: 33 µs, and 114 with 32 tokens of 64
    channels. On Blackwell 128 tokens spill 4 bytes.
    """
    few = device.matrix_unit == "tcgen05" or device.fast_memory <= 128 << 10
    block_t = power_of_two(x.shape[1], 64 if few else 128)
    block_c = power_of_two(x.shape[2], max(16, min(64, 2048 // block_t)))
    return {"block_t": block_t, "block_c": block_c, "num_warps": 4}


@rg_lru_forward.gradient_schedule("cuda")
def _cuda_gradient(x: Any, *unused: Any) -> dict[str, int]:
    """Half of a chunk, for the backward kernel holds ten tiles in registers."""
    columns = 32 // x.dtype.itemsize
    return {"block_t": power_of_two(x.shape[1], 64), "block_c": power_of_two(x.shape[2], columns), "num_warps": 4}


@rg_lru_forward.schedule("tpu")
def _tpu(x: Any, *unused: Any) -> dict[str, int]:
    return {"block_t": tiled(x.shape[1], 128, 8), "block_c": tiled(x.shape[2], 256, 128)}
