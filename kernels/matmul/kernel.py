"""The matmul kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.ir.core import cdiv
from tilekern.kernels.blocks import PROCESSORS, copies_well, depth, even, power_of_two, soonest, tiled


def _out_type(x: Any, w: Any) -> jax.ShapeDtypeStruct:
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise ArgumentError(
            "matmul takes two matrices of one dtype that fit",
            expected="x[M, K] and w[K, N] of one dtype",
            got=f"x = {x.dtype}{list(x.shape)}, w = {w.dtype}{list(w.shape)}",
            fix="reshape leading dims into M; cast with .astype",
        )
    return jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)


@tk.kernel(out_type=_out_type)
def matmul(
    x: tk.Ref, w: tk.Ref, out: tk.Ref, *, block_m: tk.Block = 128, block_n: tk.Block = 128, block_k: tk.Block = 64
) -> None:
    """out[M, N] = x[M, K] @ w[K, N], accumulated in float32 (float64; int32 for integers), in the dtype of x.

    Any sizes, blocks need not divide them.
    """
    # Programs that run together share eight tiles of rows and some of columns in the cache.
    i, j = tk.grid((x.shape[0], block_m), (w.shape[1], block_n), order=tk.grouped(8))

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[i, k], w[k, j], acc)

    wide = tk.accumulator(x.dtype)
    acc = tk.fold(tk.serial(x.shape[1], block_k), step, tk.zeros((i, j), wide))
    out[i, j] = acc.astype(out.dtype)


@matmul.schedule("cpu")
def _cpu(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    return {
        "block_m": even(x.shape[0], 512),
        "block_n": even(w.shape[1], 2048),
        "block_k": even(x.shape[1], 2048),
    }


@matmul.schedule("cpu:llvm")
def _llvm(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> dict[str, int]:
    """Large blocks copy less of the operands for a product; small ones keep more cores busy."""
    (rows, inner), columns = x.shape, w.shape[1]
    side = next((n for n in (512, 256, 128) if cdiv(rows, n) * cdiv(columns, n) >= 16), 64)
    return {"block_m": even(rows, side), "block_n": even(columns, side), "block_k": even(inner, 256)}


@matmul.schedule("cuda")
def _cuda(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, target: str) -> dict[str, int]:
    """The tile whose programs are done first, of those that fit the registers."""
    (rows, inner), columns, itemsize = x.shape, w.shape[1], x.dtype.itemsize
    fine = copies_well(inner, itemsize) and copies_well(columns, itemsize)
    deep = depth(inner, itemsize)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.int8:
        # No tensor cores and no products of tiles: all products at once are in registers.
        block_m, block_n, deep = 32, 32, 16
    elif rows <= 32:
        # Few rows: the time is that of loading w, with all multiprocessors and long rows of it.
        block_m, block_n = power_of_two(rows, 32, 16), power_of_two(columns // PROCESSORS[target], 64, 16)
    elif itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_m, block_n = soonest(rows, columns, ((128, 128), (64, 64)) if itemsize == 4 else ((64, 64),), target)
    elif fine:
        block_m, block_n = soonest(rows, columns, ((128, 256), (128, 128), (64, 128), (64, 64)), target)
    else:
        # Loads go through registers, and nothing but other programs hides how long they take. On sm_80, where
        # operands are in registers as well, they are half as deep.
        block_m, block_n, deep = 64, 128, deep // 2 if target == "cuda:sm_80" else deep
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": max(deep, 16),
        # Four warps are what multiplies 64 rows on sm_90.
        "num_warps": 8 if block_m * block_n >= 128 * 128 else 4,
        "num_stages": 4 if itemsize <= 2 else 3,
    }


@matmul.schedule("tpu")
def _tpu(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, target: str) -> dict[str, int]:
    """Whole rows and columns where they fit, for the matrix units add up by themselves; else 2048 elements of them.

    By the static estimate of 4096³ bf16, of the bound by the matrix units: 97 % on v5e, 87 % on v6e, 93 % on 7x.
    """
    rows, columns = x.shape[0], w.shape[1]
    block_m = tiled(rows, 512 if target in ("tpu:v5e", "tpu:v5p") else 1024, 8)
    block_n = tiled(columns, 1024 // max(1, x.dtype.itemsize // 2), 128)
    inner, fetched = x.shape[1], 2 * (block_m + block_n) * x.dtype.itemsize
    copied = 4 * block_m * 4 if x.dtype == jnp.float32 else 0  # into the parts that the matrix units multiply
    fits = inner * (fetched + copied) <= 40 << 20  # of the 64 MiB of vector memory that every TPU has
    return {"block_m": block_m, "block_n": block_n, "block_k": max(1, inner) if fits else tiled(inner, 2048, 128)}
