"""Inputs that are read row by row and do not fit VMEM: the array stays in HBM, and a DMA copies each row.

Mosaic copies single rows of 32-bit elements. Of narrower elements it copies the `SUBLANES` rows of a tile together.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.types import DType
from tilekern.lower.mosaic.chip import LANES, SUBLANES, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import Layout, LayoutDim
from tilekern.lower.mosaic.plan.windows import Window
from tilekern.lower.mosaic.stored_dtypes import stored_dtype


def row_dma_windows(windows: Mapping[MemoryOp, Window]) -> frozenset[Window]:
    """The windows of inputs [rows, columns] whose rows are loaded by position, with all columns or aligned tiles."""
    by_rows = {op: w for op, w in windows.items() if len(w.dims) == 2 and w.dims[0].kind == "rows"}
    mixed = {window for op, window in by_rows.items() if not _is_row_load(op, window)}
    return frozenset(by_rows.values()) - mixed


def _is_row_load(op: MemoryOp, window: Window) -> bool:
    (rows, columns), window_dim, dim = op.ref.ref.shape, window.dims[1], op.access.dims[1]
    whole = window_dim.kind == "static" and (dim.position.const, dim.size) == (0, columns)
    tiled = window_dim.kind == "tiled" and columns % dim.size == 0 and (dim.size % LANES == 0 or dim.size == columns)
    return (
        isinstance(op, Load)
        and op.ref.ref.role == "in"
        and rows % rows_per_copy(op.ref.ref.dtype) == 0
        and (whole or tiled)
    )


def rows_per_copy(dtype: DType) -> int:
    """The rows of a copy: 1 for a 32-bit dtype, `SUBLANES` for a narrower dtype."""
    return 1 if stored_dtype(dtype).itemsize == 4 else SUBLANES


def row_dma_layout(window: Window) -> Layout:
    """The layout of an array whose rows a DMA copies: XLA does not rearrange it."""
    (rows, columns), (_, window_dim) = window.param.ref.shape, window.dims
    lanes = LayoutDim(1, "lane", columns, window_dim.size if window_dim.kind == "tiled" else columns)
    return Layout(window, (LayoutDim(0, "row", rows, 1), lanes), (rows, columns), ((0, rows), (1, columns)), (0, 1))


def row_buffer_bytes(op: MemoryOp) -> int:
    """The bytes of VMEM that the copied rows of a load take."""
    dtype = stored_dtype(op.ref.ref.dtype)
    rows, columns = (1 if dim.kind == "index" else dim.size for dim in op.access.dims)
    return padded_bytes((rows * rows_per_copy(dtype), columns), dtype)
