"""Copy rows of an array in HBM to VMEM, each by a DMA of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tilekern.lower.mosaic.plan.row_dma import rows_per_copy
from tilekern.lower.mosaic.stored_dtypes import wide_dtype


def copy_rows(ref: Any, rows: Sequence[Any], start: Any, columns: int) -> Any:
    """Rows of an array in HBM as a tile [rows, columns]; all copies start before the first one is awaited.

    Args:
      ref: the array.
      rows: the number of each row.
      start: the first column, a multiple of the lanes.
      columns: the number of columns.
    """
    unit, wide = rows_per_copy(np.dtype(ref.dtype)), wide_dtype(np.dtype(ref.dtype))

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

    tile = pl.run_scoped(copied, pltpu.VMEM((len(rows) * unit, columns), ref.dtype), pltpu.SemaphoreType.DMA)
    return tile.astype(ref.dtype)
