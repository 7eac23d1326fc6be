"""The ragged_dot kernel and its blocks.

A tile may have rows of several consecutive groups. For each such group a program computes the product of the whole tile
with the group's matrix, and selects it in the group's rows. So a border inside of a tile costs one product more, and an
empty group costs nothing.

A program owns a tile of rows, and loads the matrices of all its groups. Or, on TPUs, a program owns a group, and
stores the group's rows: each matrix is loaded once, while the previous matrix is multiplied, and all rows are in vector
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import copies_well, depth, even, power_of_two, soonest, stages, takes_registers, tiled
from tilekern.kernels.ragged_dot.products import Operands, products


def _columns(rhs: Any, transpose_rhs: bool) -> int:
    return rhs.shape[1 if transpose_rhs else 2]


def out_type(lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The type of the result [M, N], in `out_dtype`, or the dtype of lhs for None."""
    return jax.ShapeDtypeStruct((lhs.shape[0], _columns(rhs, transpose_rhs)), out_dtype or lhs.dtype)


def groups_of_rows(i: tk.Tile, ends: tk.Ref) -> Any:
    """The serial axis of the groups that may have rows of tile i, without groups that end before or begin after i."""
    all_ends = ends[:]
    first = (all_ends <= i.start).sum(dtype=jnp.int32)
    last = (all_ends < i.stop).sum(dtype=jnp.int32) + 1
    return tk.serial(ends.shape[0], start=first, stop=last)


@tk.kernel(out_type=out_type, linear=("lhs",))
def ragged_dot_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    ends: tk.Ref,
    out: tk.Ref,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
    owned: tk.Choice[Literal["rows", "groups"]] = "rows",
) -> None:
    """lhs[M, K], rhs[G, K, N], ends int32[G] (ascending, in [0, M]) -> out[M, N].

    The rows of group g are ends[g - 1], ..., ends[g] - 1, and out[rows] = lhs[rows] @ rhs[g], accumulated in float32
    (float64 for float64). Rows from ends[G - 1] on are 0. With `transpose_rhs` rhs is given as [G, N, K]. A
    program owns a tile of rows, or a group, as `owned` says.
    """
    operands = Operands(lhs, (rhs,), None, (None,), transpose_rhs)
    if owned == "groups":
        rows_of_group(operands, ends, out, block_m, block_n, block_k)
        return
    i = tk.parallel(lhs.shape[0], block_m)
    j = tk.parallel(out.shape[1], block_n)
    out[i, j] = tile_of_groups(operands, i, j, ends, tk.zeros((i, j), out.dtype), block_k)


def tile_of_groups(
    operands: Operands, i: tk.Tile, j: tk.Tile, ends: tk.Ref, start: jax.Array, block_k: int, *, adds: bool = False
) -> jax.Array:
    """The product of rows i and columns j, in the dtype of `start`; with `adds`, plus `start`.

    Rows after the last group have `start`.
    """
    inner = operands.lhs.shape[1]

    def add_group(g: jax.Array, tile: jax.Array) -> jax.Array:
        begin, end = ends[g - 1], ends[g]  # ends[-1] is outside of the array: a load gives 0
        (product,) = products(operands, i, j, g, jnp.where(begin < end, inner, 0), block_k)
        mine = (i.indices >= begin) & (i.indices < end)
        # A row is of one group, so its result is final: held in its dtype, it leaves registers to the next product.
        rows = (tile + product if adds else product).astype(tile.dtype)
        return jnp.where(mine[:, None], rows, tile)

    return tk.fold(groups_of_rows(i, ends), add_group, start)


def rows_of_group(operands: Operands, ends: tk.Ref, out: tk.Ref, block_m: int, block_n: int, block_k: int) -> None:
    """Store the product for a program's group in the group's rows; the last group stores zeros in the rows after it."""
    (rows, inner), groups = operands.lhs.shape, ends.shape[0]
    j = tk.parallel(out.shape[1], block_n)
    g = tk.parallel(groups)
    begin, end = ends[g - 1], ends[g]  # ends[-1] is outside of the array: a load gives 0
    stop = jnp.where(g == groups - 1, rows, end)

    def tile(t: jax.Array) -> None:
        i = tk.tile(rows, block_m, t)
        (product,) = products(operands, i, j, g, jnp.where(i.start < end, inner, 0), block_k)
        product = jnp.where((i.indices < end)[:, None], product, 0).astype(out.dtype)
        mine = (i.indices >= begin) & (i.indices < stop)
        out.store((i, j), product, mask=jnp.broadcast_to(mine[:, None], product.shape))

    last = jnp.where(begin < stop, tk.cdiv(stop, block_m), 0)
    tk.foreach(tk.serial(tk.cdiv(rows, block_m), start=begin // block_m, stop=last), tile)


def cpu_blocks(lhs: Any, rhs: Any, transpose_rhs: bool) -> dict[str, int]:
    """Blocks of nearly equal sizes, up to 128 rows and 1024 of N and of K.

    Few rows, because a border inside of a tile doubles its product; of N and K as much as the caches hold.
    """
    return {
        "block_m": even(lhs.shape[0], 128),
        "block_n": even(_columns(rhs, transpose_rhs), 1024),
        "block_k": even(lhs.shape[1], 1024),
    }


def llvm_blocks(lhs: Any, rhs: Any, transpose_rhs: bool) -> dict[str, int]:
    """Blocks of up to 128 rows, as on "cpu:xla", but 512 of N and 256 of K: copies of `rhs` stay in a core's cache."""
    return {
        "block_m": even(lhs.shape[0], 128),
        "block_n": even(_columns(rhs, transpose_rhs), 512),
        "block_k": even(lhs.shape[1], 256),
    }


def cuda_blocks(lhs: Any, rhs: Any, device: tk.Device, *, columns: int = 0, products: int = 1) -> dict[str, int]:
    """Blocks, `num_warps` and `num_stages` of a matmul with more accumulators.

    A tile with a border between groups selects from two products. `columns` is the number of the result's columns; 0
    rules out tiles of 256 columns with 128 rows. `products` is the number of products that share the rows.
    """
    (rows, inner), groups, itemsize = lhs.shape, rhs.shape[0], lhs.dtype.itemsize
    if rows <= 32:
        # Loading the matrices of the groups takes the time.
        block_m, block_n, num_warps = power_of_two(rows, 32, 16), 64, 4
    elif itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_m, block_n, num_warps = 64, 64, 8
    elif rows >= 256 * groups and products == 1:
        # The sums of 256 columns take 128 registers of a thread, and the rows of earlier groups 64.
        large = bool(columns) and device.matrix_unit == "wgmma" and all(copies_well(n, itemsize) for n in rhs.shape[1:])
        tiles = ((128, 256), (128, 128)) if large else ((128, 128),)
        (block_m, block_n), num_warps = soonest(rows, columns, tiles, device.cores), 8
    else:
        # A border costs as much as a tile, so tiles have few rows: 64, the least that sm_90 multiplies at once.
        block_m, block_n, num_warps = 64, 256 // products, 8
    block_k, most = depth(inner, itemsize), 3 if itemsize > 2 or takes_registers(device) else 4
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_warps": num_warps,
        "num_stages": stages((block_m + products * block_n) * block_k * itemsize, most, device),
    }


def tpu_blocks(lhs: Any, rhs: Any, transpose_rhs: bool, *, products: int = 1, operands: int = 0) -> dict[str, int]:
    """The blocks of a matmul, with at most 256 rows: a border inside of a tile doubles its product.

    Whole rows are in VMEM. The tiles fit the 64 MiB that every TPU has, because an exported program may run on any TPU.
    `products` share the rows, and `operands` counts further tiles of the result's shape.
    """
    (rows, inner), columns, itemsize = lhs.shape, _columns(rhs, transpose_rhs), lhs.dtype.itemsize
    fits = products * inner * tiled(columns, 1024, 128) * itemsize <= 8 << 20
    block_k = max(1, inner) if fits else tiled(inner, 2048, 128)
    # bytes of a row that are copied into operands of the matrix units
    copied = 4 * block_k * 4 if lhs.dtype == jnp.float32 else 0
    tiles = [(tiled(rows, m, 8), tiled(columns, n, 128)) for m, n in ((256, 1024), (256, 512), (128, 256), (128, 128))]

    def bytes_of(m: int, n: int) -> int:
        extra = 4 * m * n * (2 * (products - 1) + operands)  # sums, and tiles of operands
        return 2 * inner * (m + products * n) * itemsize + m * copied + extra

    block_m, block_n = next((t for t in tiles if bytes_of(*t) <= 50 << 20), tiles[-1])
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k}


def tpu_blocks_of_groups(lhs: Any, rhs: Any, transpose_rhs: bool) -> dict[str, int | str] | None:
    """The blocks of programs that own groups, `owned="groups"`; None unless all rows fit the VMEM of every TPU.

    Programs load the matrices of empty groups, too: None if many groups may be empty. By the static estimate Mixtral's
    products of 4096 rows take half of the time of programs that own rows, on v5e, v6e and 7x.
    """
    (rows, inner), groups, columns = lhs.shape, rhs.shape[0], _columns(rhs, transpose_rhs)
    if lhs.dtype.itemsize > 2 or not 0 < 4 * groups <= rows:
        return None
    block_m = tiled(rows, 128 if rows >= 128 * groups else 64, 8)
    for limit in (1024, 512, 256):
        block_n = tiled(columns, limit, 128)
        matrices = 2 * inner * block_n * rhs.dtype.itemsize
        # the rows, and two buffers of the result's rows
        if matrices + rows * (inner * lhs.dtype.itemsize + 2 * block_n * 2) <= 50 << 20:
            return {"block_m": block_m, "block_n": block_n, "block_k": max(1, inner), "owned": "groups"}
    return None


@ragged_dot_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, ends: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return cpu_blocks(lhs, rhs, transpose_rhs)


@ragged_dot_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, ends: Any, transpose_rhs: bool = False) -> dict[str, int]:
    return llvm_blocks(lhs, rhs, transpose_rhs)


@ragged_dot_forward.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, ends: Any, device: tk.Device, transpose_rhs: bool = False) -> dict[str, int]:
    return cuda_blocks(lhs, rhs, device, columns=_columns(rhs, transpose_rhs))


@ragged_dot_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, ends: Any, transpose_rhs: bool = False) -> Mapping[str, int | str]:
    return tpu_blocks_of_groups(lhs, rhs, transpose_rhs) or tpu_blocks(lhs, rhs, transpose_rhs)
