"""The matmul kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.blocks import (
    LOADING,
    copies_well,
    depth,
    even,
    power_of_two,
    soonest,
    stages,
    takes_registers,
    tiled,
)


def matmul_type(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool) -> jax.ShapeDtypeStruct:
    """The type of lhs @ rhs, [M, N] in the dtype of lhs."""
    fits = len(lhs.shape) == 2 and len(rhs.shape) == 2 and lhs.dtype == rhs.dtype
    if not fits or lhs.shape[0 if transpose_lhs else 1] != rhs.shape[1 if transpose_rhs else 0]:
        left, right = ("[K, M]" if transpose_lhs else "[M, K]"), ("[N, K]" if transpose_rhs else "[K, N]")
        raise ArgumentError(
            "matmul takes two matrices of one dtype that fit",
            expected=f"lhs{left} and rhs{right} of one dtype",
            got=f"lhs = {lhs.dtype}{list(lhs.shape)}, rhs = {rhs.dtype}{list(rhs.shape)}",
            fix="cast with .astype; tilekern.kernels.matmul.matmul takes leading dims",
        )
    rows, _, columns = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    return jax.ShapeDtypeStruct((rows, columns), lhs.dtype)


def _sizes(lhs: Any, rhs: Any, transpose_lhs: bool, transpose_rhs: bool) -> tuple[int, int, int]:
    """M, K and N."""
    rows, inner = reversed(lhs.shape) if transpose_lhs else lhs.shape
    return rows, inner, rhs.shape[0 if transpose_rhs else 1]


@tk.kernel(out_type=matmul_type)
def matmul(
    lhs: tk.Ref,
    rhs: tk.Ref,
    out: tk.Ref,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[M, N] = lhs[M, K] @ rhs[K, N], accumulated in float32 (float64; int32 for integers), in the dtype of lhs.

    Sizes are free, blocks need not divide them. With `transpose_lhs` lhs is [K, M], with `transpose_rhs` rhs is
    [N, K]; no transposed copy is made.
    """
    # Programs that run at the same time share eight tiles of rows, and some tiles of columns, in the cache.
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(lhs[k, i].T if transpose_lhs else lhs[i, k], rhs[j, k].T if transpose_rhs else rhs[k, j], acc)

    wide = tk.accumulator(lhs.dtype)
    _, inner, _ = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    acc = tk.fold(tk.serial(inner, block_k), step, tk.zeros((i, j), wide))
    out[i, j] = acc.astype(out.dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@matmul.schedule("cpu")
def cpu_blocks(
    lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, transpose_lhs: bool = False, transpose_rhs: bool = False
) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    rows, inner, columns = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    return {"block_m": even(rows, 512), "block_n": even(columns, 2048), "block_k": even(inner, 2048)}


@matmul.schedule("cpu:llvm")
def llvm_blocks(
    lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, transpose_lhs: bool = False, transpose_rhs: bool = False
) -> dict[str, int]:
    """Large blocks copy less of the operands for a product; small blocks keep more cores busy."""
    rows, inner, columns = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    side = next((n for n in (512, 256, 128) if tk.cdiv(rows, n) * tk.cdiv(columns, n) >= 16), 64)
    return {"block_m": even(rows, side), "block_n": even(columns, side), "block_k": even(inner, 256)}


@matmul.schedule("cuda")
def cuda_blocks(
    lhs: jax.ShapeDtypeStruct,
    rhs: jax.ShapeDtypeStruct,
    device: tk.Device,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
) -> dict[str, int]:
    """The tile that fits the registers with the shortest time for all programs."""
    rows, inner, columns = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    itemsize = lhs.dtype.itemsize
    fine = copies_well(lhs.shape[1], itemsize) and copies_well(rhs.shape[1], itemsize)
    if device.emitter == "gluon":
        return _gluon_blocks(rows, columns, itemsize, device)
    # On sm_90 8-bit floats are multiplied as float16, and the float16 copies take registers.
    widened = device.matrix_unit == "wgmma" and itemsize == 1 and jnp.issubdtype(lhs.dtype, jnp.floating)
    deep = depth(inner, 2 if widened else itemsize)
    if jnp.issubdtype(lhs.dtype, jnp.integer) and lhs.dtype != jnp.int8:
        # Neither tensor cores nor a dot of tiles: all products of a tile are in registers at once.
        block_m, block_n, deep = 32, 32, 16
    elif rows <= 32:
        # Few rows: loading rhs takes the time. All multiprocessors load, in long rows.
        block_m, block_n = power_of_two(rows, 32, 16), power_of_two(columns // device.cores, 64, 16)
    elif itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_m, block_n = soonest(
            rows, columns, ((128, 128), (64, 64)) if itemsize == 4 else ((64, 64),), device.cores
        )
    elif fine:
        tiles = (128, 256), (128, 128), (64, 128), (64, 64)
        # Operands are in registers on sm_80, where a transposed operand of the largest tile would spill.
        large = not takes_registers(device) or not (transpose_lhs or transpose_rhs)
        block_m, block_n = soonest(rows, columns, tiles if large else tiles[1:], device.cores)
    else:
        # Loads go through registers, and only other programs hide their latency. On sm_80 operands are in registers,
        # too, so tiles are half as deep. A transposed rhs takes more registers.
        block_m, block_n = 64, 64 if transpose_rhs else 128
        deep = deep // 2 if takes_registers(device) else deep
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": max(deep, 16),
        # On sm_90 four warps multiply 64 rows.
        "num_warps": 8 if block_m * block_n >= 128 * 128 else 4,
        "num_stages": stages((block_m + block_n) * max(deep, 16) * itemsize, 4 if itemsize <= 2 else 3, device),
    }


def _gluon_blocks(rows: int, columns: int, itemsize: int, device: tk.Device) -> dict[str, int]:
    """Tiles for each of two warpgroups, which share the tile of rhs: together they have 128 rows, in a cluster 256.

    Tiles of 8 bits are cast: each warpgroup has columns of its own, and casts their tile for 128 rows.
    """
    if itemsize == 1:
        return {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8}

    def time(choice: tuple[int, int]) -> float:
        blocks, n = choice
        waves = tk.cdiv(tk.cdiv(rows, 128 * blocks) * tk.cdiv(columns, n), device.cores // blocks)
        return waves * (128 * n + LOADING * (128 + n / blocks))

    clusters = range(1, device.cluster + 1) if rows > 128 else (1,)
    blocks, block_n = min(((blocks, n) for blocks in clusters for n in (256, 128)), key=time)
    return {"block_m": 64 * blocks, "block_n": block_n, "block_k": 64, "num_warps": 8, "num_ctas": blocks}


@matmul.schedule("tpu")
def tpu_blocks(
    lhs: jax.ShapeDtypeStruct,
    rhs: jax.ShapeDtypeStruct,
    target: str,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
) -> dict[str, int]:
    """Whole rows and columns where they fit, because the matrix units add up by themselves; else 2048 terms.

    By the static estimate of 4096³ bf16, of the bound by the matrix units: 97 % on v5e, 87 % on v6e, 93 % on 7x.
    """
    rows, inner, columns = _sizes(lhs, rhs, transpose_lhs, transpose_rhs)
    block_m = tiled(rows, 512 if target in ("tpu:v5e", "tpu:v5p") else 1024, 8)
    block_n = tiled(columns, 1024 // max(1, lhs.dtype.itemsize // 2), 128)
    fetched = 2 * (block_m + block_n) * lhs.dtype.itemsize
    copied = 4 * block_m * 4 if lhs.dtype == jnp.float32 else 0  # into the parts that the matrix units multiply
    fits = inner * (fetched + copied) <= 40 << 20  # of the 64 MiB of vector memory that every TPU has
    return {"block_m": block_m, "block_n": block_n, "block_k": max(1, inner) if fits else tiled(inner, 2048, 128)}
