"""What the kernels share that work on rows: the type of their output, and coarse blocks for CPUs."""

from __future__ import annotations

from typing import Any

import jax

from tilekern.kernels.blocks import even

# The elements of a tile on a CPU: enough work for all threads, and few enough to stay in the cache.
TILE_ELEMENTS = 1 << 20


def like_first(x: Any, *others: Any) -> jax.ShapeDtypeStruct:
    """The `out_type` of a kernel whose output is like its first input."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def coarse(rows: int, columns: int) -> tuple[int, int]:
    """Blocks for an array [rows, columns] on a CPU: whole rows if possible, in even portions."""
    block_columns = max(1, min(columns, TILE_ELEMENTS))
    return even(rows, TILE_ELEMENTS // block_columns), block_columns


def coarse_blocks(x: Any, *others: Any) -> dict[str, int]:
    """The schedule for CPUs of a kernel whose first input is x[R, C]."""
    block_rows, block_columns = coarse(*x.shape)
    return {"block_rows": block_rows, "block_columns": block_columns}
