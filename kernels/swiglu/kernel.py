"""The swiglu kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, tiled
from tilekern.kernels.derivatives import derive
from tilekern.kernels.rows import cached_blocks, coarse_blocks, like_first, warps_for
from tilekern.kernels.swiglu.reference import reference


@tk.kernel(out_type=like_first)
def swiglu_forward(
    gate: tk.Ref, up: tk.Ref, out: tk.Ref, *, block_rows: tk.Block = 8, block_columns: tk.Block = 512
) -> None:
    """out[R, C] = silu(gate[R, C]) * up[R, C], computed in float32 (float64 for float64)."""
    i = tk.parallel(gate.shape[0], block_rows)
    j = tk.parallel(gate.shape[1], block_columns)
    wide = tk.accumulator(gate.dtype)
    out[i, j] = (jax.nn.silu(gate[i, j].astype(wide)) * up[i, j].astype(wide)).astype(out.dtype)


def _backward_types(gate: Any, up: Any, cotangent: Any, *, wanted: tuple[bool, bool]) -> tuple[Any, ...]:
    return tuple(like_first(x) if w else None for x, w in zip((gate, up), wanted, strict=True))


@tk.kernel(out_type=_backward_types)
def swiglu_backward_kernel(
    gate: tk.Ref,
    up: tk.Ref,
    cotangent: tk.Ref,
    dgate: tk.Ref | None,
    dup: tk.Ref | None,
    *,
    wanted: tuple[bool, bool],
    block_rows: tk.Block = 8,
    block_columns: tk.Block = 512,
) -> None:
    """The `wanted` cotangents of gate and up, [R, C]: with σ = 1 / (1 + exp(-gate)), of the cotangent of gate σ up.

    dgate = cotangent up σ (1 + gate (1 - σ)) and dup = cotangent gate σ.
    """
    i = tk.parallel(gate.shape[0], block_rows)
    j = tk.parallel(gate.shape[1], block_columns)
    wide = tk.accumulator(gate.dtype)
    g, given = gate[i, j].astype(wide), cotangent[i, j].astype(wide)
    share = jax.nn.sigmoid(g)
    if dgate is not None:
        dgate[i, j] = (given * up[i, j].astype(wide) * (share * (1 + g * (1 - share)))).astype(dgate.dtype)
    if dup is not None:
        dup[i, j] = (given * (g * share)).astype(dup.dtype)


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
