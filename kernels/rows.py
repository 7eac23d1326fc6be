"""Shared parts of the kernels that work on rows: the type of their output, and their blocks."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled

# The elements of a tile on a CPU: enough work for all threads, and few enough to stay in the cache.
TILE_ELEMENTS = 1 << 20

# The most elements of a tile that stays in a second-level cache.
CACHED_ELEMENTS = 1 << 16

# Elements of a tile on "cpu:llvm" that short rows share: it stays in the first cache.
SHORT_TILE_ELEMENTS = 2048

# Elements of a tile for each thread of a GPU: two loads of 16 bytes for 16-bit numbers, four for float32. With all
# threads of a multiprocessor that is 64 KiB and more on the way, and the memory is busy from about 32 KiB on.
PER_THREAD = 16

# Elements of a row that a program of a GPU holds in registers between the reduction and its result.
HELD = 16384


def like_first(x: Any, *unused: Any) -> jax.ShapeDtypeStruct:
    """The `out_type` of a kernel whose output is like its first input."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def coarse(rows: int, columns: int) -> tuple[int, int]:
    """Blocks for an array [rows, columns] on a CPU: whole rows if possible, in even portions."""
    block_columns = max(1, min(columns, TILE_ELEMENTS))
    return even(rows, TILE_ELEMENTS // block_columns), block_columns


def coarse_blocks(x: Any, *unused: Any) -> dict[str, int]:
    """The schedule for CPUs of a kernel whose first input is x[R, C]."""
    block_rows, block_columns = coarse(*x.shape)
    return {"block_rows": block_rows, "block_columns": block_columns}


def cached(rows: int, columns: int) -> tuple[int, int]:
    """Blocks for an array [rows, columns] whose programs go over a tile several times: it stays in a core's cache.

    A tile is one row, or a few short ones: then the CPU reads memory in order.
    """
    block_columns = max(1, min(columns, CACHED_ELEMENTS))
    return even(rows, max(1, SHORT_TILE_ELEMENTS // block_columns)), block_columns


def cached_blocks(x: Any, *unused: Any) -> dict[str, int]:
    """The schedule for "cpu:llvm" of a kernel whose first input is x[R, C]."""
    block_rows, block_columns = cached(*x.shape)
    return {"block_rows": block_rows, "block_columns": block_columns}


def tpu_blocks(x: Any, *unused: Any) -> dict[str, int]:
    """The schedule for TPUs of a kernel that reduces the rows of its first input x[R, C].

    Whole rows, a mebibyte as float32: copies are long enough to keep HBM busy all the time.
    """
    rows, columns = x.shape
    block_columns = tiled(columns, 1 << 18, 128)
    return {"block_rows": tiled(rows, max(8, (1 << 18) // block_columns // 8 * 8), 8), "block_columns": block_columns}


def warps_for(elements: int) -> int:
    """Warps for a tile of so many elements; above 16, reductions across them take longer than they save."""
    return power_of_two(elements // (32 * PER_THREAD), 16)


def gpu_blocks(x: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    """The schedule for GPUs of a kernel that reduces the rows of its first input x[R, C].

    Rows that do not stay in registers are read in blocks of `PER_THREAD` elements for each thread. Warps of a program
    wait for each other at every reduction, and meanwhile other programs have to read: rows get so many warps that a
    multiprocessor has 32.
    """
    rows, columns = x.shape
    if columns <= HELD:
        return whole_rows(rows, columns)
    least, most = 4, 16
    num_warps = 1 << max(least, min(most, 32 * device.cores // max(1, rows))).bit_length() - 1
    return {"block_rows": 1, "block_columns": 32 * PER_THREAD * num_warps, "num_warps": num_warps}


def whole_rows(rows: int, columns: int) -> dict[str, int]:
    """Blocks for a GPU whose programs hold rows in registers: up to `HELD` elements, 32 for each thread."""
    block_columns = power_of_two(columns, HELD)
    # Short rows share a program, so that each has four warps to switch between.
    block_rows = power_of_two(rows, max(1, 2048 // block_columns))
    num_warps = warps_for(block_rows * block_columns)
    return {"block_rows": block_rows, "block_columns": block_columns, "num_warps": num_warps}
