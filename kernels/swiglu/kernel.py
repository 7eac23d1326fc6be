"""The swiglu kernel and its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, tiled
from tilekern.kernels.derivatives import derive
from tilekern.kernels.rows import cached_blocks, coarse_blocks, like_first, warps_for
from tilekern.kernels.swiglu.reference import ACTIVATIONS, reference


@tk.kernel(out_type=like_first)
def swiglu_forward(
    gate: tk.Ref,
    up: tk.Ref,
    out: tk.Ref,
    *,
    activation: str = "silu",
    block_rows: tk.Block = 8,
    block_columns: tk.Block = 512,
) -> None:
    """out[R, C] = activation(gate[R, C]) * up[R, C], computed in float32 (float64 for float64)."""
    i = tk.parallel(gate.shape[0], block_rows)
    j = tk.parallel(gate.shape[1], block_columns)
    wide = tk.accumulator(gate.dtype)
    out[i, j] = (ACTIVATIONS[activation](gate[i, j].astype(wide)) * up[i, j].astype(wide)).astype(out.dtype)


def _backward_types(
    gate: Any, up: Any, cotangent: Any, *, needs: tuple[bool, bool], activation: str
) -> tuple[Any, ...]:
    return tuple(like_first(x) if n else None for x, n in zip((gate, up), needs, strict=True))


@tk.kernel(out_type=_backward_types)
def swiglu_backward_kernel(
    gate: tk.Ref,
    up: tk.Ref,
    cotangent: tk.Ref,
    dgate: tk.Ref | None,
    dup: tk.Ref | None,
    *,
    needs: tuple[bool, bool],
    activation: str = "silu",
    block_rows: tk.Block = 8,
    block_columns: tk.Block = 512,
) -> None:
    """The cotangents of gate and up, [R, C], from the cotangent of a(gate) up; None without a flag in `needs`.

    dgate = cotangent up a'(gate) and dup = cotangent a(gate).
    """
    i = tk.parallel(gate.shape[0], block_rows)
    j = tk.parallel(gate.shape[1], block_columns)
    wide = tk.accumulator(gate.dtype)
    g, c = gate[i, j].astype(wide), cotangent[i, j].astype(wide)
    value, slope = _with_slope(activation, g)
    if dgate is not None:
        dgate[i, j] = (c * up[i, j].astype(wide) * slope()).astype(dgate.dtype)
    if dup is not None:
        dup[i, j] = (c * value()).astype(dup.dtype)


def _with_slope(activation: str, g: jax.Array) -> tuple[Callable[[], jax.Array], Callable[[], jax.Array]]:
    """Functions that compute the activation of g and its derivative: of g σ, with the sigmoid σ, σ (1 + g (1 - σ))."""
    if activation == "silu":
        share = jax.nn.sigmoid(g)
        return lambda: g * share, lambda: share * (1 + g * (1 - share))
    if activation == "gelu":
        # g Φ(g) for the normal distribution Φ, whose lower tail erfc keeps; the derivative is Φ(g) + g Φ'(g).
        below = 0.5 * jax.lax.erfc(g * -math.sqrt(0.5))
        return lambda: g * below, lambda: below + g * jnp.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    value, slope = jax.jvp(ACTIVATIONS[activation], (g,), (jnp.ones_like(g),))
    return lambda: value, lambda: slope


swiglu_tangent, swiglu_backward = derive(swiglu_forward, reference, swiglu_backward_kernel)


def _cuda(gate: Any, up: Any, *cotangents: Any) -> dict[str, int]:
    """Four warps with two loads of 16 bytes from each input for a thread; tiles so narrow that few lanes are ragged."""
    rows, columns = gate.shape
    block_columns = power_of_two(columns, 1024)
    block_rows = power_of_two(rows, max(1, 2048 // block_columns))
    num_warps = warps_for(block_rows * block_columns)
    return {"block_rows": block_rows, "block_columns": block_columns, "num_warps": num_warps}


def _tpu(gate: Any, up: Any, *cotangents: Any) -> dict[str, int]:
    """A mebibyte as float32: long copies, which keep HBM busy."""
    rows, columns = gate.shape
    block_columns = tiled(columns, 4096, 128)
    return {"block_rows": tiled(rows, max(8, (1 << 18) // block_columns // 8 * 8), 8), "block_columns": block_columns}


for _kernel in (swiglu_forward, swiglu_backward_kernel):
    _kernel.schedule("cpu")(coarse_blocks)
    _kernel.schedule("cpu:llvm")(cached_blocks)
    _kernel.schedule("cuda")(_cuda)
    _kernel.schedule("tpu")(_tpu)
