"""The kernel of grouped products with scales, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, power_of_two, stages
from tilekern.kernels.checks import is_float
from tilekern.kernels.ragged_dot.kernel import (
    cpu_blocks,
    cuda_blocks,
    llvm_blocks,
    out_type,
    rows_of_group,
    tile_of_groups,
    tpu_blocks,
    tpu_blocks_of_groups,
)
from tilekern.kernels.ragged_dot.products import Operands

FOUR_BITS = ("int4", "float4_e2m1fn")


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
    owned: tk.Choice[Literal["rows", "groups"]] = "rows",
) -> None:
    """`ragged_dot_forward` of numbers of 8 or 4 bits, or of floats, times scales as of `Operands`."""
    operands = Operands(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    if owned == "groups":
        rows_of_group(operands, ends, out, block_m, block_n, block_k)
        return
    i = tk.parallel(lhs.shape[0], block_m)
    j = tk.parallel(out.shape[1], block_n)
    out[i, j] = tile_of_groups(operands, i, j, ends, tk.zeros((i, j), out.dtype), block_k)


def whole_bytes(blocks: dict[str, int], *operands: Any) -> dict[str, int]:
    """The blocks of a schedule; if an operand has 4 bits, those of the inner dim and of columns are whole bytes."""
    if not has_four_bits(*operands):
        return blocks
    return {name: n if name == "block_m" else n + n % 2 for name, n in blocks.items()}


def has_four_bits(*operands: Any) -> bool:
    """True if an operand has numbers of 4 bits."""
    return any(str(x.dtype) in FOUR_BITS for x in operands)


@scaled_ragged_dot_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return whole_bytes(cpu_blocks(lhs, rhs, transpose_rhs), lhs, rhs)


@scaled_ragged_dot_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return whole_bytes(llvm_blocks(lhs, rhs, transpose_rhs), lhs, rhs)


@scaled_ragged_dot_forward.schedule("cuda")
def _cuda(
    lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, device: tk.Device, target: str
) -> dict[str, int]:
    """Four warps for int8 on sm_100: eight spill, and by the static estimate take 1.08 of the time.

    The other Blackwell GPUs multiply int8 from registers, where four warps would hold too many.
    """
    scales = lhs_scale, rhs_scale
    blocks = scaled_cuda_blocks(lhs, rhs, device, scales=scales)
    if target == "cuda:sm_100" and lhs.dtype == rhs.dtype == jnp.int8 and _is_simple((lhs, rhs), scales):
        return {**blocks, "num_warps": 4}
    return blocks


def scaled_cuda_blocks(
    lhs: Any, rhs: Any, device: tk.Device, *, products: int = 1, scales: Any = None
) -> dict[str, int]:
    """Tiles of few columns: registers hold the sums of a block, all sums, and the rows of earlier groups.

    Numbers of 4 bits are unpacked in registers, too, and float32 operands are multiplied in registers. `scales` is the
    pair of scales of lhs and rhs; None for a kernel that may keep more in registers.
    """
    if lhs.dtype == rhs.dtype and is_float(lhs):
        return cuda_blocks(lhs, rhs, device, products=products)
    (rows, inner), itemsize = lhs.shape, lhs.dtype.itemsize
    few = itemsize > 2 or str(rhs.dtype) in FOUR_BITS or str(lhs.dtype) in FOUR_BITS
    block_m, block_n, num_warps = (power_of_two(rows, 32, 16), 64, 4) if rows <= 32 else (64, 64 if few else 128, 8)
    block_n, block_k = max(16, block_n // products), min(64, depth(inner, itemsize)) if few else depth(inner, itemsize)
    blocks = scales is None or any(scale is not None and scale.shape[1] > 1 for scale in scales)
    if device.matrix_unit == "wgmma" and itemsize <= 2:
        # Several programs share a multiprocessor: one converts operands while others multiply.
        num_warps = 4
        if itemsize == 2 and not few and not blocks and rows >= 256 * rhs.shape[0]:
            block_m = 128
        if jnp.issubdtype(rhs.dtype, jnp.floating) and not (blocks and device.emitter == "gluon"):
            block_k = min(64, block_k)
    if device.emitter == "gluon" and block_m >= 64:
        # For each of two warpgroups, which share the rows: one warpgroup casts tiles while the second one multiplies.
        return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_warps": 8}
    # 8-bit floats are float16 in the shared memory of Hopper GPUs.
    nbytes = (block_m * itemsize + products * block_n) * block_k
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_warps": num_warps,
        "num_stages": stages(2 * nbytes, 3, device),
    }


@scaled_ragged_dot_forward.schedule("tpu")
def _tpu(
    lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool = False
) -> Mapping[str, int | str]:
    blocks = tpu_blocks_of_groups(lhs, rhs, transpose_rhs) if _is_simple((lhs, rhs), (lhs_scale, rhs_scale)) else None
    return blocks or scaled_tpu_blocks(lhs, rhs, (lhs_scale, rhs_scale), transpose_rhs)


def _is_simple(operands: Any, scales: Any) -> bool:
    """True for whole bytes whose scales are of rows and columns alone: sums are scaled once."""
    return not has_four_bits(*operands) and all(s is None or s.shape[1] == 1 for s in scales)


def scaled_tpu_blocks(
    lhs: Any, rhs: Any, scales: Any, transpose_rhs: bool, *, products: int = 1, operands: int = 0
) -> dict[str, int]:
    """The blocks of products without scales; at most 256 numbers of the inner dim if its blocks have their own scales.

    On v6e 128-blocks of 8 groups, 4096×1024×1024, take 58 µs by the static estimate, 72 µs with eight blocks a tile.
    """
    blocks = tpu_blocks(lhs, rhs, transpose_rhs, products=products, operands=operands)
    if any(scale is not None and scale.shape[1] > 1 for scale in scales):
        blocks["block_k"] = min(blocks["block_k"], 256)
    return whole_bytes(blocks, lhs, rhs)
