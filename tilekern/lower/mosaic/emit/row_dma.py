"""Rows at any place of an array that does not fit VMEM: the array stays in HBM, and each row is copied by a DMA.

Mosaic copies single rows of 32-bit numbers, of narrower ones the rows of a tile together, of which one is then chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.types import DType
from tilekern.lower.mosaic.chip import LANES, SUBLANES, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import Layout, ViewDim
from tilekern.lower.mosaic.plan.windows import Window
from tilekern.lower.mosaic.storage import stored_dtype, widened


def fetchable(windows: Mapping[MemoryOp, Window]) -> frozenset[Window]:
    """The windows of inputs [rows, columns] that are read by rows, all columns or tiles of whole registers."""
    by_rows = {op: w for op, w in windows.items() if len(w.roles) == 2 and w.roles[0].kind == "rows"}
    others = {window for op, window in by_rows.items() if not _is_fetchable(op, window)}
    return frozenset(by_rows.values()) - others


def _is_fetchable(op: MemoryOp, window: Window) -> bool:
    (rows, columns), role, dim = op.ref.ref.shape, window.roles[1], op.access.dims[1]
    whole = role.kind == "static" and (dim.position.const, dim.size) == (0, columns)
    tiled = role.kind == "tiled" and columns % dim.size == 0 and (dim.size % LANES == 0 or dim.size == columns)
    return isinstance(op, Load) and op.ref.ref.role == "in" and rows % _unit(op.ref.ref.dtype) == 0 and (whole or tiled)


def _unit(dtype: DType) -> int:
    """How many rows a copy has."""
    return 1 if stored_dtype(dtype).itemsize == 4 else SUBLANES


def layout_in_place(window: Window) -> Layout:
    """The array as it is, for XLA to leave alone."""
    (rows, columns), (_, role) = window.param.ref.shape, window.roles
    lanes = ViewDim(1, "lane", columns, role.size if role.kind == "tiled" else columns)
    return Layout(window, (ViewDim(0, "row", rows, 1), lanes), (rows, columns), ((0, rows), (1, columns)), (0, 1))


def fetched_bytes(op: MemoryOp) -> int:
    """What the rows of a load take of VMEM."""
    dtype = stored_dtype(op.ref.ref.dtype)
    rows, columns = (1 if dim.kind == "index" else dim.size for dim in op.access.dims)
    return padded_bytes((rows * _unit(dtype), columns), dtype)


def fetch(ref: Any, rows: Sequence[Any], start: Any, columns: int) -> Any:
    """Rows of an array in HBM as a tile [rows, columns]; all copies are on their way at once.

    Args:
      ref: the array.
      rows: the number of each row.
      start: the first column, a multiple of the lanes.
      columns: how many.
    """
    unit, wide = _unit(ref.dtype), widened(np.dtype(ref.dtype))

    def copied(buffer: Any, semaphore: Any) -> Any:
        copies = list[Any]()
        for n, row in enumerate(rows):
            first = row if unit == 1 else pl.multiple_of(row // unit * unit, unit)
            source = ref.at[pl.ds(first, unit), pl.ds(start, columns)]
            copies.append(pltpu.make_async_copy(source, buffer.at[pl.ds(n * unit, unit), :], semaphore))
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
        if unit == 1:
            return buffer[...]
        return jnp.concatenate([_chosen(buffer[n * unit : (n + 1) * unit], row) for n, row in enumerate(rows)], axis=0)

    def _chosen(tile: Any, row: Any) -> Any:
        number = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        return jnp.where(number == row % unit, tile.astype(wide), 0).sum(axis=0, keepdims=True)

    found = pl.run_scoped(copied, pltpu.VMEM((len(rows) * unit, columns), ref.dtype), pltpu.SemaphoreType.DMA)
    return found.astype(ref.dtype)
