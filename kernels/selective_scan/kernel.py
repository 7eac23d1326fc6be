"""The selective_scan kernel and its blocks.

A program computes some channels of one sequence, chunk after chunk. Within a chunk all N recurrences of the channels
are one `tk.linear_scan` of tiles [tokens, N, channels]; the last row is the carry. Tokens beyond the end have a step of
0, so that their decay is 1 and they add nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.recurrences import begins_new_sequence


def _out_type(
    x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any, initial_state: Any, segment_ids: Any
) -> tuple[Any, Any]:
    state = jax.ShapeDtypeStruct((x.shape[0], *a.shape), tk.accumulator(x.dtype))
    return jax.ShapeDtypeStruct(x.shape, x.dtype), state


@tk.kernel(out_type=_out_type)
def selective_scan_forward(
    x: tk.Ref,
    dt: tk.Ref,
    a: tk.Ref,
    b: tk.Ref,
    c: tk.Ref,
    d: tk.Ref | None,
    z: tk.Ref | None,
    dt_bias: tk.Ref | None,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    final_state: tk.Ref,
    *,
    dt_softplus: bool = False,
    block_t: tk.Block = 16,
    block_c: tk.Block = 32,
) -> None:
    """x, dt, z[B, T, C], a[C, N], b, c[B, T, N], d, dt_bias[C], initial_state[B, C, N] -> out, final_state.

    Computed in float32 (float64 for float64). `segment_ids` is [B, T].
    """
    i = tk.parallel(x.shape[0])
    j = tk.parallel(x.shape[2], block_c)
    wide = tk.accumulator(x.dtype)
    rates = a[j].astype(wide).T * math.log2(math.e)  # exp2 takes fewer operations than exp, for each state and token

    def chunk(t: tk.Tile, state: jax.Array) -> jax.Array:
        steps = _steps(dt[i, t, j].astype(wide), dt_bias, j, dt_softplus)
        steps = jnp.where(t.valid[:, None], steps, 0)
        inputs = x[i, t, j].astype(wide)
        decays = jnp.exp2(steps[:, None, :] * rates)
        first = begins_new_sequence(t, segment_ids, i)
        if first is not None:
            decays = jnp.where(first[:, None, None], 0, decays)
        added = (steps * inputs)[:, None, :] * b[i, t].astype(wide)[:, :, None]
        row = jax.lax.broadcasted_iota(jnp.int32, added.shape, 0)
        states = tk.linear_scan(decays, jnp.where(row == 0, decays * state + added, added))
        result = (states * c[i, t].astype(wide)[:, :, None]).sum(axis=1)
        if d is not None:
            result += d[j].astype(wide) * inputs
        if z is not None:
            result *= jax.nn.silu(z[i, t, j].astype(wide))
        out[i, t, j] = result.astype(out.dtype)
        return states[-1]

    start = tk.zeros((a.shape[1], j), wide) if initial_state is None else initial_state[i, j].astype(wide).T
    final_state[i, j] = tk.fold(tk.serial(x.shape[1], block_t), chunk, start).T


def _steps(dt: jax.Array, dt_bias: Any, j: tk.Tile, softplus: bool) -> jax.Array:
    steps = dt if dt_bias is None else dt + dt_bias[j].astype(dt.dtype)
    return jax.nn.softplus(steps) if softplus else steps


@selective_scan_forward.schedule("cpu")
def _cpu(x: Any, *unused: Any) -> dict[str, int]:
    """Channels of one AVX-512 register, so that the tiles of a chunk stay in a core's cache."""
    return {"block_t": even(x.shape[1], 64), "block_c": even(x.shape[2], 16)}


@selective_scan_forward.schedule("cuda")
def _cuda(x: Any, *unused: Any) -> dict[str, int]:
    """32 states a thread: of 16 tokens each, for a thread holds all tokens of its states."""
    return {"block_t": power_of_two(x.shape[1], 16), "block_c": power_of_two(x.shape[2], 16), "num_warps": 4}


@selective_scan_forward.gradient_schedule("cuda")
def _cuda_gradient(x: Any, *unused: Any) -> dict[str, int]:
    """Half of the channels, in four warps: by the static estimate of Mamba-130M on sm_90 0.77 of the time of eight."""
    return {"block_t": power_of_two(x.shape[1], 16), "block_c": power_of_two(x.shape[2], 8), "num_warps": 4}


@selective_scan_forward.schedule("tpu")
def _tpu(x: Any, *unused: Any) -> dict[str, int]:
    """States are rows of registers, channels their lanes: a step of the scan is one operation on each register.

    Two registers of channels share the broadcasts of b and c: by the static estimate of Mamba-130M 0.74 of the time of
    one register on v5e, and with the gradient 0.78. Four registers take as long.
    """
    return {"block_t": tiled(x.shape[1], 64, 8), "block_c": tiled(x.shape[2], 256, 128)}
