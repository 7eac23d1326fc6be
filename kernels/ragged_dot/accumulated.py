"""Grouped products that are added to an array in place, such as gradients of several batches."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.ragged_dot import contracting, kernel
from tilekern.kernels.ragged_dot.contracting import matrix_tile, ragged_contracting_forward
from tilekern.kernels.ragged_dot.derivatives import ragged_contracting_by_rhs
from tilekern.kernels.ragged_dot.kernel import tile_of_groups
from tilekern.kernels.ragged_dot.products import Operands
from tilekern.kernels.ragged_dot.scaled import scaled_cuda_blocks, scaled_tpu_blocks, whole_bytes
from tilekern.kernels.ragged_dot.scaled_derivatives import product_tangent


def _no_results(*arrays: Any, **static: Any) -> tuple[()]:
    return ()


@tk.kernel(out_type=_no_results, donate=("total",))
def ragged_dot_into(
    total: tk.Ref,
    lhs: tk.Ref,
    rhs: tk.Ref,
    ends: tk.Ref,
    lhs_scale: tk.Ref | None,
    rhs_scale: tk.Ref | None,
    *,
    transpose_rhs: bool = False,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """Add the product of `scaled_ragged_dot_forward` to total[M, N], in float32 (float64 for float64)."""
    operands = Operands(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    i = tk.parallel(lhs.shape[0], block_m)
    j = tk.parallel(total.shape[1], block_n)
    tile = tile_of_groups(operands, i, j, ends, total[i, j].astype(operands.wide), block_k, adds=True)
    total[i, j] = tile.astype(total.dtype)


@tk.kernel(out_type=_no_results, donate=("total",))
def ragged_contracting_into(
    total: tk.Ref,
    lhs: tk.Ref,
    rhs: tk.Ref,
    ends: tk.Ref,
    *,
    block_k: tk.Block = 128,
    block_n: tk.Block = 128,
    block_m: tk.Block = 64,
) -> None:
    """Add the matrices of `ragged_contracting_forward` to total[G, K, N], in float32 (float64 for float64)."""
    k, j = tk.grid((lhs.shape[1], block_k), (rhs.shape[1], block_n), order=tk.grouped(8))
    g = tk.parallel(ends.shape[0])
    start = total[g, k, j].astype(tk.accumulator(lhs.dtype))
    total[g, k, j] = matrix_tile(lhs, rhs, ends, g, k, j, start, block_m).astype(total.dtype)


# --- derivatives ------------------------------------------------------------------------------------------------------


def _plus(total: jax.Array | None, part: jax.Array | None) -> jax.Array | None:
    return part if total is None else total if part is None else total + part


@ragged_dot_into.defjvp
def _into_jvp(primals: Any, tangents: Any, *, transpose_rhs: bool, **blocks: int) -> Any:
    (total, *operands), (dtotal, *moved) = primals, tangents
    out = ragged_dot_into(*primals, transpose_rhs=transpose_rhs, **blocks)
    return out, _plus(dtotal, product_tangent(operands, moved, transpose_rhs=transpose_rhs, out_dtype=total.dtype.name))


@ragged_contracting_into.defjvp
def _contracting_jvp(primals: Any, tangents: Any, **blocks: int) -> Any:
    (total, lhs, rhs, ends), (dtotal, dlhs, drhs, _) = primals, tangents
    out, dtype = ragged_contracting_into(*primals, **blocks), total.dtype.name
    if dlhs is not None:
        dtotal = _plus(dtotal, ragged_contracting_forward(dlhs, rhs, ends, out_dtype=dtype))
    if drhs is not None:
        dtotal = _plus(dtotal, ragged_contracting_by_rhs(lhs, drhs, ends, out_dtype=dtype))
    return out, dtotal


# --- blocks -----------------------------------------------------------------------------------------------------------


@ragged_dot_into.schedule("cpu")
def _cpu(total: Any, lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return whole_bytes(kernel.cpu_blocks(lhs, rhs, transpose_rhs), lhs, rhs)


@ragged_dot_into.schedule("cpu:llvm")
def _llvm(total: Any, lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return whole_bytes(kernel.llvm_blocks(lhs, rhs, transpose_rhs), lhs, rhs)


@ragged_dot_into.schedule("cuda")
def _cuda(total: Any, lhs: Any, rhs: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    return scaled_cuda_blocks(lhs, rhs, device)


@ragged_dot_into.schedule("tpu")
def _tpu(total: Any, lhs: Any, rhs: Any, *ends_and_scales: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return scaled_tpu_blocks(lhs, rhs, ends_and_scales[1:], transpose_rhs)


@ragged_contracting_into.schedule("cpu")
def _contracting_cpu(total: Any, lhs: Any, rhs: Any, ends: Any) -> dict[str, int]:
    return contracting.cpu_blocks(lhs, rhs)


@ragged_contracting_into.schedule("cpu:llvm")
def _contracting_llvm(total: Any, lhs: Any, rhs: Any, ends: Any) -> dict[str, int]:
    return contracting.llvm_blocks(lhs, rhs)


@ragged_contracting_into.schedule("cuda")
def _contracting_cuda(total: Any, lhs: Any, rhs: Any, ends: Any) -> dict[str, int]:
    return contracting.cuda_blocks(lhs, rhs)


@ragged_contracting_into.schedule("tpu")
def _contracting_tpu(total: Any, lhs: Any, rhs: Any, ends: Any, target: str) -> dict[str, int]:
    return contracting.tpu_blocks(lhs, rhs, ends, target, result_bytes=4 * total.dtype.itemsize)
