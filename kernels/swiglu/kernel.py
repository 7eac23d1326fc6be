"""The swiglu kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, tiled
from tilekern.kernels.rows import cached_blocks, coarse_blocks, like_first, warps_for


@tk.kernel(out_type=like_first)
def swiglu_forward(
    gate: tk.Ref, up: tk.Ref, out: tk.Ref, *, block_rows: tk.Block = 8, block_columns: tk.Block = 512
) -> None:
    """out[R, C] = silu(gate[R, C]) * up[R, C], computed in float32 (float64 for float64)."""
    i = tk.parallel(gate.shape[0], block_rows)
    j = tk.parallel(gate.shape[1], block_columns)
    wide = tk.accumulator(gate.dtype)
    out[i, j] = (jax.nn.silu(gate[i, j].astype(wide)) * up[i, j].astype(wide)).astype(out.dtype)


swiglu_forward.schedule("cpu")(coarse_blocks)
swiglu_forward.schedule("cpu:llvm")(cached_blocks)


@swiglu_forward.schedule("cuda")
def _cuda(gate: Any, up: Any) -> dict[str, int]:
    """Four warps with two loads of 16 bytes from each input for a thread; tiles so narrow that few lanes are ragged."""
    rows, columns = gate.shape
    block_columns = power_of_two(columns, 1024)
    block_rows = power_of_two(rows, max(1, 2048 // block_columns))
    num_warps = warps_for(block_rows * block_columns)
    return {"block_rows": block_rows, "block_columns": block_columns, "num_warps": num_warps}


@swiglu_forward.schedule("tpu")
def _tpu(gate: Any, up: Any) -> dict[str, int]:
    """A mebibyte as float32: long copies, which keep HBM busy."""
    rows, columns = gate.shape
    block_columns = tiled(columns, 4096, 128)
    return {"block_rows": tiled(rows, max(8, (1 << 18) // block_columns // 8 * 8), 8), "block_columns": block_columns}
