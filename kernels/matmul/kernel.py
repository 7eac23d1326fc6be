"""The matmul kernel and its blocks."""

from __future__ import annotations

from collections.abc import Callable
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
from tilekern.kernels.matmul.batches import Product


def matmul_type(x: Any, w: Any, *, transpose_x: bool, transpose_w: bool) -> jax.ShapeDtypeStruct:
    """The type of x @ w, [M, N] in the dtype of x."""
    fits = len(x.shape) == 2 and len(w.shape) == 2 and x.dtype == w.dtype
    if not fits or x.shape[0 if transpose_x else 1] != w.shape[1 if transpose_w else 0]:
        left, right = ("[K, M]" if transpose_x else "[M, K]"), ("[N, K]" if transpose_w else "[K, N]")
        raise ArgumentError(
            "matmul takes two matrices of one dtype that fit",
            expected=f"x{left} and w{right} of one dtype",
            got=f"x = {x.dtype}{list(x.shape)}, w = {w.dtype}{list(w.shape)}",
            fix="cast with .astype; only calls take leading dims, of both matrices",
        )
    rows, _, columns = _sizes(x, w, transpose_x, transpose_w)
    return jax.ShapeDtypeStruct((rows, columns), x.dtype)


def _sizes(x: Any, w: Any, transpose_x: bool, transpose_w: bool) -> tuple[int, int, int]:
    """M, K and N."""
    rows, inner = reversed(x.shape) if transpose_x else x.shape
    return rows, inner, w.shape[0 if transpose_w else 1]


def _product(function: Callable[..., None]) -> Product:
    return Product(matmul_type, (), (), 1 << 30, function)


@_product
def matmul(
    x: tk.Ref,
    w: tk.Ref,
    out: tk.Ref,
    *,
    transpose_x: bool = False,
    transpose_w: bool = False,
    split_k: int | None = None,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[*B, M, N] = x[*B, M, K] @ w[*B, K, N], accumulated in float32 (float64; int32 for integers).

    The result has the dtype of x. Sizes are free, blocks need not divide them. With `transpose_x` x is [*B, K, M], with
    `transpose_w` w is [*B, N, K]; no transposed copy is made.

    Leading dims broadcast as in `jnp.matmul`, without copies. If w has no leading dims, the leading dims of x are rows.
    The traced kernel multiplies two matrices.

    `split_k`: long sums may be split into so many parts, of at least 128 terms. Different programs compute the parts,
    which are then added in order. Results never change beyond rounding. If None, the schedule chooses: sums of 4096
    terms and more are split where a GPU's multiprocessors, or all cores but one of a CPU, would lack a tile to compute.
    """
    assert split_k in (None, 1), "the kernel itself splits no sum"
    # Programs that run at the same time share eight tiles of rows, and some tiles of columns, in the cache.
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[k, i].T if transpose_x else x[i, k], w[j, k].T if transpose_w else w[k, j], acc)

    wide = tk.accumulator(x.dtype)
    _, inner, _ = _sizes(x, w, transpose_x, transpose_w)
    acc = tk.fold(tk.serial(inner, block_k), step, tk.zeros((i, j), wide))
    out[i, j] = acc.astype(out.dtype)


# --- derivatives ------------------------------------------------------------------------------------------------------


def _tangent_type(x: Any, w: Any, dx: Any, dw: Any, *, transpose_x: bool, transpose_w: bool) -> jax.ShapeDtypeStruct:
    left, right = (x, dw) if dx is None or w is None else (dx, w)
    return matmul_type(left, right, transpose_x=transpose_x, transpose_w=transpose_w)


@tk.op(out_type=_tangent_type, linear=("dx", "dw"))
def matmul_tangent(
    x: jax.Array | None,
    w: jax.Array | None,
    dx: jax.Array | None,
    dw: jax.Array | None,
    *,
    transpose_x: bool,
    transpose_w: bool,
) -> jax.Array:
    """dx w + x dw, the derivative of `matmul`; None is a matrix of zeros."""
    pairs = [(left, right) for left, right in ((dx, w), (x, dw)) if left is not None and right is not None]
    first, *second = (matmul(*pair, transpose_x=transpose_x, transpose_w=transpose_w) for pair in pairs)
    return first + second[0] if second else first


@matmul.defjvp
def _jvp(primals: Any, tangents: Any, *, transpose_x: bool, transpose_w: bool, **blocks: int) -> Any:
    transposes = {"transpose_x": transpose_x, "transpose_w": transpose_w}
    return matmul(*primals, **transposes, **blocks), matmul_tangent(*primals, *tangents, **transposes)


@matmul_tangent.defjvp
def _tangent_jvp(primals: Any, tangents: Any, **transposes: bool) -> Any:
    """Along x and w, with constant dx and dw: the same sum, with tangents of x and w in the place of x and w."""
    (_, _, dx, dw), (x, w, _, _) = primals, tangents
    moved = (x is not None and dw is not None) or (dx is not None and w is not None)
    tangent = matmul_tangent(dx, dw, x, w, **transposes) if moved else None
    return matmul_tangent(*primals, **transposes), tangent


@matmul_tangent.deftranspose
def _tangent_transpose(
    cotangent: jax.Array, x: Any, w: Any, dx: Any, dw: Any, *, transpose_x: bool, transpose_w: bool
) -> dict[str, jax.Array]:
    """The cotangents of dx and dw: cotangent wᵀ and xᵀ cotangent; transposed: w cotangentᵀ and cotangentᵀ x."""
    cotangents: dict[str, jax.Array] = {}
    if dx is not None and w is not None:
        cotangents["dx"] = (
            matmul(w, cotangent, transpose_x=transpose_w, transpose_w=True)
            if transpose_x
            else matmul(cotangent, w, transpose_w=not transpose_w)
        )
    if dw is not None and x is not None:
        cotangents["dw"] = (
            matmul(cotangent, x, transpose_x=True, transpose_w=transpose_x)
            if transpose_w
            else matmul(x, cotangent, transpose_x=not transpose_x)
        )
    return cotangents


# --- blocks -----------------------------------------------------------------------------------------------------------


@matmul.schedule("cpu")
def cpu_blocks(
    x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, transpose_x: bool = False, transpose_w: bool = False
) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    rows, inner, columns = _sizes(x, w, transpose_x, transpose_w)
    return {"block_m": even(rows, 512), "block_n": even(columns, 2048), "block_k": even(inner, 2048)}


@matmul.schedule("cpu:llvm")
def llvm_blocks(
    x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, transpose_x: bool = False, transpose_w: bool = False
) -> dict[str, int]:
    """Large blocks copy less of the operands for a product; small blocks keep more cores busy."""
    rows, inner, columns = _sizes(x, w, transpose_x, transpose_w)
    side = next((n for n in (512, 256, 128) if tk.cdiv(rows, n) * tk.cdiv(columns, n) >= 16), 64)
    return {"block_m": even(rows, side), "block_n": even(columns, side), "block_k": even(inner, 256)}


@matmul.schedule("cuda")
def cuda_blocks(
    x: jax.ShapeDtypeStruct,
    w: jax.ShapeDtypeStruct,
    device: tk.Device,
    transpose_x: bool = False,
    transpose_w: bool = False,
) -> dict[str, int]:
    """The tile that fits the registers with the shortest time for all programs."""
    rows, inner, columns = _sizes(x, w, transpose_x, transpose_w)
    itemsize = x.dtype.itemsize
    fine = copies_well(x.shape[1], itemsize) and copies_well(w.shape[1], itemsize)
    if device.emitter == "gluon":
        return _gluon_blocks(rows, columns, itemsize, device)
    # On sm_90 8-bit floats are multiplied as float16, and the float16 copies take registers.
    widened = device.matrix_unit == "wgmma" and itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    deep = depth(inner, 2 if widened else itemsize)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.int8:
        # Neither tensor cores nor a dot of tiles: all products of a tile are in registers at once.
        block_m, block_n, deep = 32, 32, 16
    elif rows <= 32:
        # Few rows: loading w takes the time. All multiprocessors load, in long rows.
        block_m, block_n = power_of_two(rows, 32, 16), power_of_two(columns // device.cores, 64, 16)
    elif itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_m, block_n = soonest(
            rows, columns, ((128, 128), (64, 64)) if itemsize == 4 else ((64, 64),), device.cores
        )
    elif fine:
        tiles = (128, 256), (128, 128), (64, 128), (64, 64)
        # Operands are in registers on sm_80, where a transposed operand of the largest tile would spill.
        large = not takes_registers(device) or not (transpose_x or transpose_w)
        block_m, block_n = soonest(rows, columns, tiles if large else tiles[1:], device.cores)
    else:
        # Loads go through registers, and only other programs hide their latency. On sm_80 operands are in registers,
        # too, so tiles are half as deep. A transposed w takes more registers.
        block_m, block_n = 64, 64 if transpose_w else 128
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
    """Tiles for each of two warpgroups, which share the tile of w: together they have 128 rows, in a cluster 256.

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
    x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, target: str, transpose_x: bool = False, transpose_w: bool = False
) -> dict[str, int]:
    """Whole rows and columns where they fit, because the matrix units add up by themselves; else 2048 terms.

    By the static estimate of 4096³ bf16, of the bound by the matrix units: 97 % on v5e, 87 % on v6e, 93 % on 7x.
    """
    rows, inner, columns = _sizes(x, w, transpose_x, transpose_w)
    block_m = tiled(rows, 512 if target in ("tpu:v5e", "tpu:v5p") else 1024, 8)
    block_n = tiled(columns, 1024 // max(1, x.dtype.itemsize // 2), 128)
    fetched = 2 * (block_m + block_n) * x.dtype.itemsize
    copied = 4 * block_m * 4 if x.dtype == jnp.float32 else 0  # into the parts that the matrix units multiply
    fits = inner * (fetched + copied) <= 40 << 20  # of the 64 MiB of vector memory that every TPU has
    return {"block_m": block_m, "block_n": block_n, "block_k": max(1, inner) if fits else tiled(inner, 2048, 128)}
