"""The kernels of products of numbers with scales, and their blocks.

The product of a tile is computed as in `ragged_dot` with one group. Without groups, devices may divide the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.epilogues import Epilogue, mapped
from tilekern.kernels.matmul.kernel import cpu_blocks, llvm_blocks
from tilekern.kernels.ragged_dot.kernel import out_type
from tilekern.kernels.ragged_dot.products import Operands, products
from tilekern.kernels.ragged_dot.scaled import has_four_bits, scaled_cuda_blocks, scaled_tpu_blocks, whole_bytes

_ONLY: Any = 0
"""The number of the only group."""


@tk.kernel(out_type=out_type, linear=("lhs",))
def quantized_matmul_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    lhs_scale: tk.Ref | None,
    rhs_scale: tk.Ref | None,
    out: tk.Ref,
    *,
    transpose_rhs: bool,
    out_dtype: Any,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """out[M, N] = (lhs * lhs_scale) @ (rhs * rhs_scale)[0], with shapes as of `Operands` for one group."""
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))
    operands = Operands(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    (product,) = products(operands, i, j, _ONLY, None, block_k)
    out[i, j] = product.astype(out.dtype)


def _fused_type(lhs: Any, rhs: Any, *unused: Any, epilogue: Any, transpose_rhs: bool, out_dtype: Any) -> Any:
    return out_type(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=out_dtype)


@tk.kernel(out_type=_fused_type)
def fused_quantized_matmul_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    lhs_scale: tk.Ref | None,
    rhs_scale: tk.Ref | None,
    operands: tuple[tk.Ref, ...],
    out: tk.Ref,
    *,
    epilogue: Epilogue,
    transpose_rhs: bool,
    out_dtype: Any,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """epilogue(product, *operands) of the product of `quantized_matmul_forward`; operands are [M or 1, N or 1]."""
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))
    factors = Operands(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    (product,) = products(factors, i, j, _ONLY, None, block_k)

    def part(operand: tk.Ref) -> jax.Array:
        """The tile (i, j) of an operand; a dim of size 1 is broadcast."""
        rows, columns = (n == size for n, size in zip(out.shape, operand.shape, strict=True))
        tile = operand[i if rows else 0, j if columns else 0].astype(factors.wide)
        tile = tile if rows else tile[None]
        return jnp.broadcast_to(tile if columns else tile[..., None], product.shape)

    out[i, j] = mapped(epilogue, product, *(part(operand) for operand in operands)).astype(out.dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@quantized_matmul_forward.schedule("cpu")
@fused_quantized_matmul_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool) -> dict[str, int]:
    return whole_bytes(cpu_blocks(lhs, _matrix(rhs), transpose_rhs=transpose_rhs), lhs, rhs)


@quantized_matmul_forward.schedule("cpu:llvm")
@fused_quantized_matmul_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool) -> dict[str, int]:
    """As of products, but one row by numbers of 4 bits reads as many bytes of each row as by numbers of 8 bits.

    Short pieces of rows are read at 0.6 of the speed of long ones.
    """
    blocks = whole_bytes(llvm_blocks(lhs, _matrix(rhs), transpose_rhs=transpose_rhs), lhs, rhs)
    columns, wide = rhs.shape[1 if transpose_rhs else 2], 2 * blocks["block_n"]
    is_long = lhs.shape[0] <= 4 and not transpose_rhs and tk.cdiv(columns, wide) >= 8
    return {**blocks, "block_n": wide} if is_long and has_four_bits(rhs) else blocks


@quantized_matmul_forward.schedule("cuda")
@fused_quantized_matmul_forward.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    return scaled_cuda_blocks(lhs, rhs, device, scales=(lhs_scale, rhs_scale))


@quantized_matmul_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool) -> Mapping[str, int]:
    return scaled_tpu_blocks(lhs, rhs, (lhs_scale, rhs_scale), transpose_rhs)


@fused_quantized_matmul_forward.schedule("tpu")
def _fused_tpu(
    lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, operands: Any, transpose_rhs: bool
) -> Mapping[str, int]:
    return scaled_tpu_blocks(lhs, rhs, (lhs_scale, rhs_scale), transpose_rhs, operands=len(operands))


def _matrix(rhs: Any) -> Any:
    return jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)
