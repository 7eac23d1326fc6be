"""The kernel of grouped products with scales, and its blocks."""

from __future__ import annotations

from typing import Any

import tilekern as tk
from tilekern.kernels.ragged_dot.kernel import (
    cpu_blocks,
    cuda_blocks,
    llvm_blocks,
    out_type,
    tile_of_groups,
    tpu_blocks,
)
from tilekern.kernels.ragged_dot.products import Operands


@tk.kernel(out_type=out_type, linear=("lhs",))
def scaled_ragged_dot_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    ends: tk.Ref,
    lhs_scale: tk.Ref | None,
    rhs_scale: tk.Ref | None,
    out: tk.Ref,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """`ragged_dot_forward` of numbers of 8 or 4 bits, or of floats, times scales as of `Operands`."""
    given = Operands(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    i = tk.parallel(lhs.shape[0], block_m)
    j = tk.parallel(out.shape[1], block_n)
    out[i, j] = tile_of_groups(given, i, j, ends, tk.zeros((i, j), given.wide), block_k).astype(out.dtype)


@scaled_ragged_dot_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return cpu_blocks(lhs, rhs, transpose_rhs)


@scaled_ragged_dot_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return llvm_blocks(lhs, rhs, transpose_rhs)


@scaled_ragged_dot_forward.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, device: tk.Device) -> dict[str, int]:
    return cuda_blocks(lhs, rhs, device)


@scaled_ragged_dot_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return tpu_blocks(lhs, rhs, transpose_rhs)
