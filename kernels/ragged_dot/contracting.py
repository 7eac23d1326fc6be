"""The kernel of a grouped product whose inner dim is cut into groups: a matrix for each group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, even, power_of_two, tiled


def out_type(lhs: Any, rhs: Any, ends: Any, *, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The type of the result [G, K, N], in `out_dtype`, or the dtype of lhs for None."""
    return jax.ShapeDtypeStruct((ends.shape[0], lhs.shape[1], rhs.shape[1]), out_dtype or lhs.dtype)


@tk.kernel(out_type=out_type, linear=("lhs",))
def ragged_contracting_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    ends: tk.Ref,
    out: tk.Ref,
    *,
    out_dtype: Any = None,
    block_k: tk.Block = 128,
    block_n: tk.Block = 128,
    block_m: tk.Block = 64,
) -> None:
    """lhs[M, K], rhs[M, N], ends int32[G] (ascending, in [0, M]) -> out[G, K, N].

    The rows of group g are ends[g - 1], ..., ends[g] - 1, and out[g] = lhs[rows]ᵀ rhs[rows], accumulated in float32
    (float64 for float64). The matrix of an empty group is 0.
    """
    # One group after the other: on TPUs a tile's rows of all groups stay in vector memory.
    k, j = tk.grid((lhs.shape[1], block_k), (rhs.shape[1], block_n), order=tk.grouped(8))
    g = tk.parallel(ends.shape[0])

    start = tk.zeros((k, j), tk.accumulator(lhs.dtype))
    out[g, k, j] = matrix_tile(lhs, rhs, ends, g, k, j, start, block_m).astype(out.dtype)


def matrix_tile(
    lhs: tk.Ref, rhs: tk.Ref, ends: tk.Ref, g: jax.Array, k: tk.Tile, j: tk.Tile, start: jax.Array, block_m: int
) -> jax.Array:
    """Tile (k, j) of the matrix of group g, plus `start`."""

    def step(i: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(lhs[i, k].T, rhs[i, j], acc)

    # ends[-1] is outside of the array: a load gives 0
    rows = tk.serial(lhs.shape[0], block_m, start=ends[g - 1], stop=ends[g])
    return tk.fold(rows, step, start)


def cpu_blocks(lhs: Any, rhs: Any) -> dict[str, int]:
    """Few rows, because a tile computes its rows of other groups, too."""
    return {
        "block_k": even(lhs.shape[1], 1024),
        "block_n": even(rhs.shape[1], 1024),
        "block_m": even(lhs.shape[0], 128),
    }


def llvm_blocks(lhs: Any, rhs: Any) -> dict[str, int]:
    """Large tiles, which copy less of the operands for a product; few rows, as on "cpu:xla"."""
    return {
        "block_k": even(lhs.shape[1], 512),
        "block_n": even(rhs.shape[1], 512),
        "block_m": even(lhs.shape[0], 128),
    }


def cuda_blocks(lhs: Any, rhs: Any) -> dict[str, int]:
    """The tiles of a matmul: without tensor cores, operands and sums are all in registers."""
    inner, columns, itemsize = lhs.shape[1], rhs.shape[1], lhs.dtype.itemsize
    side = 64 if itemsize > 2 else 128
    return {
        "block_k": power_of_two(inner, side, 16),
        "block_n": power_of_two(columns, side, 16),
        "block_m": depth(lhs.shape[0], itemsize),
        "num_warps": 8,
        "num_stages": 3,
    }


def tpu_blocks(lhs: Any, rhs: Any, ends: Any, target: str, *, result_bytes: int) -> dict[str, int]:
    """The largest tiles whose rows all fit the vector memory; if none fits, rows are copied in the fold.

    `result_bytes` is the number of bytes in vector memory for each element of a tile of results. A product is as deep
    as the matrix units. The last rows of a group are a tile of their own, which wastes half a tile on average, so tiles
    of small groups have few rows, too.
    """
    (rows, inner), columns, itemsize = lhs.shape, rhs.shape[1], lhs.dtype.itemsize

    def bytes_of(k: int, n: int) -> int:
        copies = 1 if k == inner else 2, 1 if n == columns else 2
        return rows * (copies[0] * k + copies[1] * n) * itemsize + k * n * (4 + result_bytes)

    most = 100 << 20 if target in ("tpu:v5e", "tpu:v6e") else 52 << 20
    sizes = [(k, n) for k in (4096, 2048, 1024) for n in (1024, 512)]
    tiles = [(tiled(inner, k, 128), tiled(columns, n, 128)) for k, n in sizes]
    copied = tiles[sizes.index((1024, 1024))]
    block_k, block_n = next((tile for tile in tiles if bytes_of(*tile) <= most), copied)
    deep = rows >= 384 * ends.shape[0] and target not in ("tpu:v5e", "tpu:v5p")
    return {"block_k": block_k, "block_n": block_n, "block_m": tiled(rows, 256 if deep else 128, 128)}


@ragged_contracting_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, ends: Any) -> dict[str, int]:
    return cpu_blocks(lhs, rhs)


@ragged_contracting_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, ends: Any) -> dict[str, int]:
    return llvm_blocks(lhs, rhs)


@ragged_contracting_forward.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, ends: Any, target: str) -> dict[str, int]:
    return cuda_blocks(lhs, rhs)


@ragged_contracting_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, ends: Any, target: str, out_dtype: Any = None) -> dict[str, int]:
    itemsize = jnp.dtype(out_dtype or lhs.dtype).itemsize
    return tpu_blocks(lhs, rhs, ends, target, result_bytes=2 * itemsize)
