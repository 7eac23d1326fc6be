"""The swiglu kernel and its blocks."""

from __future__ import annotations

import jax

import tilekern as tk
from tilekern.kernels.rows import coarse_blocks, like_first


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
