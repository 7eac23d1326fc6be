"""Loads, stores and atomic updates of blocks in VMEM.

Masks cover the elements behind the end of an array, which are undefined in a block, and positions that the index map
has clamped. Dims of kind "rows" (see `windows`) are accessed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.core import Value
from tilekern.ir.memory import Atomic, Dim, Load, MemoryOp, Store, WriteOp
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, I32, DType, kind_of
from tilekern.lower.jax_ops import combiner
from tilekern.lower.mosaic.emit.index_maps import when
from tilekern.lower.mosaic.emit.row_dma import copy_rows
from tilekern.lower.mosaic.emit.scalars import read_table
from tilekern.lower.mosaic.emit.tile_shapes import indexed_shape, register_shape, row_along_dim, with_shape
from tilekern.lower.mosaic.plan.hbm_layout import Layout, LayoutDim, is_squeezed
from tilekern.lower.mosaic.stored_dtypes import as_stored, select_wide, wide_dtype
from tilekern.lower.positions import locate

Get = Callable[[Value], Any]


@record
class RowSlice:
    """One row of an access by rows.

    Attributes:
      index: the position in the array along each dim of kind "rows", clamped into it.
      inside: True if the row is in bounds; None if all rows are in bounds.
      number: the place of the row in the accessed tile, along each dim of kind "rows".
    """

    index: Mapping[int, Any]
    inside: Any
    number: tuple[int, ...]


class Memory:
    """The accesses of one step to its blocks.

    Args:
      layouts: the layout of each access's array.
      inputs: the blocks of inputs, by layout.
      outputs: the blocks of outputs.
      tables: the arrays in scalar memory.
      row_dma_inputs: the layouts of inputs in HBM whose rows a DMA copies.
      ranges: the known intervals of integers.
      scalar, vector: return the value of a scalar, and of a vector in row form.
    """

    def __init__(
        self,
        layouts: Mapping[MemoryOp, Layout | None],
        inputs: Mapping[Layout, Any],
        outputs: Mapping[Value, Any],
        tables: Mapping[Value, Any],
        row_dma_inputs: frozenset[Layout],
        ranges: Mapping[Value, Interval],
        scalar: Get,
        vector: Get,
    ) -> None:
        self._layouts, self._inputs, self._outputs, self._tables = layouts, inputs, outputs, tables
        self._row_dma_inputs = row_dma_inputs
        self._ranges, self._scalar, self._vector = ranges, scalar, vector

    @contextmanager
    def with_blocks(self, inputs: Mapping[Layout, Any], outputs: Mapping[Value, Any]) -> Generator[None]:
        """Within this context, use the blocks that a pipeline has fetched from arrays in HBM."""
        before = self._inputs, self._outputs
        self._inputs, self._outputs = {**self._inputs, **inputs}, {**self._outputs, **outputs}
        yield
        self._inputs, self._outputs = before

    def ref(self, array: Layout | Value) -> Any:
        """The block of an input, or of an output."""
        return self._inputs[array] if isinstance(array, Layout) else self._outputs[array]

    # --- the three kinds of access ---

    def load(self, op: Load, mask: Any) -> Any:
        """The elements of a load: a scalar, a row [1, n], or a tile."""
        if op.ref in self._tables:
            return self._load_scalar(op, mask)
        shape, dtype = register_shape(op.access.shape), op.result.tile.dtype
        fill = jnp.zeros((), dtype) if op.fill is None else self._scalar(op.fill)
        layout = self._layouts[op]
        if layout is None:
            return fill if op.access.shape == () else jnp.full(shape, fill, dtype)
        ref = self._outputs.get(op.ref)
        ref = self._inputs[layout] if ref is None else ref
        x = self._load_block(op, layout, ref)
        inside = self._bounds_mask(op, shape)
        keep = inside if mask is None else mask if inside is None else inside & mask
        if keep is not None:
            x = select_wide(keep, x, as_stored(fill))
        return x != 0 if dtype == BOOL else x

    def store(self, op: Store, value: Any, mask: Any) -> None:
        """Store elements."""
        self._write(op, value, mask, lambda old, new: new)

    def atomic(self, op: Atomic, value: Any, mask: Any) -> None:
        """Combine `value` with the elements of the block; programs that share elements run one after the other."""
        self._write(op, value, mask, lambda old, new: combine(op, old, new))

    # --- reading ---

    def _load_scalar(self, op: Load, mask: Any) -> Any:
        operands = {v: self._scalar(v) for v in op.operands[1:]}
        number = read_table(op, operands, self._tables[op.ref])
        fill = np.zeros((), op.result.tile.dtype) if op.fill is None else operands[op.fill]
        if mask is None:
            return number
        chosen = select_wide(mask, as_stored(number), as_stored(jnp.asarray(fill)))
        return chosen != 0 if op.result.tile.dtype == BOOL else chosen

    def _load_block(self, op: Load, layout: Layout, ref: Any) -> Any:
        """All elements of a load, in the order of its dims; elements out of bounds are undefined."""
        dims = op.access.dims
        if prod(op.access.shape) == 0:
            return jnp.zeros(register_shape(op.access.shape), ref.dtype)
        if layout in self._row_dma_inputs:
            places, columns = [row.index[0] for row in self._row_slices(op, layout)], dims[1].size
            start = 0 if columns == ref.shape[1] else pl.multiple_of(self._position(op, 1), columns)
            return with_shape(copy_rows(ref, places, start, columns), register_shape(op.access.shape))
        rows = [d for d in _row_dims(layout) if dims[d].kind != "index"]
        vectors = [d for d in range(len(dims)) if d not in _row_dims(layout) and dims[d].kind != "index"]
        shape = tuple(dims[d].size for d in vectors)
        parts = [
            with_shape(self._block(op, layout, ref, row), register_shape(shape)) for row in self._row_slices(op, layout)
        ]
        if not rows:
            return parts[0]
        order = [*rows, *vectors]
        if order == sorted(order) and len(shape) == 1:
            return with_shape(jnp.concatenate(parts, axis=0), register_shape(op.access.shape))
        x = jnp.stack(parts).reshape((*(dims[d].size for d in rows), *shape))
        if order != sorted(order):
            x = jnp.transpose(x, [order.index(d) for d in sorted(order)])
        return with_shape(x, register_shape(op.access.shape))

    def _block(self, op: MemoryOp, layout: Layout, ref: Any, row: RowSlice) -> Any:
        """The slice of a block that one row covers: the dims that are neither single positions nor rows, in order."""
        x = ref[self._index(op, layout, row)]
        pairs = zip(op.access.dims, op.ref.ref.shape, strict=True)
        missing = [self._clipped_range(dim, length)[2:] for dim, length in pairs]
        widths = [missing[v.dim] for v in _lane_dims(layout)]
        if any(w != (0, 0) for w in widths):
            x = jnp.pad(x, [(0, 0)] * (x.ndim - len(widths)) + widths)
        return x

    def _clipped_range(self, dim: Dim, length: int) -> tuple[int, int, int, int]:
        """The bounds of a dim at a constant position, clipped into the array, and the elements clipped on each side."""
        if dim.position.terms or dim.kind == "gather":
            return 0, 0, 0, 0
        low = min(max(dim.position.const, 0), length)
        high = min(max(dim.position.const + dim.size, low), length)
        if low == high:  # all out of bounds: read any elements, which are masked
            low, high = 0, min(dim.size, length)
            return low, high, 0, dim.size - high
        return low, high, low - dim.position.const, dim.position.const + dim.size - high

    def _index(self, op: MemoryOp, layout: Layout, row: RowSlice) -> tuple[Any, ...]:
        window_dims, dims, shape = layout.window.dims, op.access.dims, op.ref.ref.shape
        split = {v.dim for v in layout.dims if v.use == "tile"}
        index: list[Any] = []
        for view in layout.dims:
            if is_squeezed(view, window_dims):
                continue
            if view.use == "tile":
                tile = self._position(op, view.dim) // dims[view.dim].size
                index.append(jnp.clip(tile, 0, view.length - 1))
            elif view.use == "row":
                index.append(row.index[view.dim])
            elif view.use in ("unit", "fold") or view.dim in split or window_dims[view.dim].kind == "tiled":
                index.append(slice(None))
            elif window_dims[view.dim].kind == "static":
                low, high, _, _ = self._clipped_range(dims[view.dim], shape[view.dim])
                index.append(slice(low, high))
            else:
                size = dims[view.dim].size
                start = jnp.clip(self._position(op, view.dim), 0, view.block - size)
                index.append(pl.ds(pl.multiple_of(start, size), size))
        return tuple(index)

    # --- places ---

    def _position(self, op: MemoryOp, d: int) -> Any:
        """The start of an access along a dim; for a gather, without the part of its index vector."""
        position = op.access.dims[d].position
        operands = [self._scalar(v) if v.tile.shape == () else np.int32(0) for v in op.positions]
        return locate(position, operands, [self._ranges.get(v) for v in op.positions])

    def _gather_places(self, op: MemoryOp, d: int) -> Any:
        """The positions of a gather, as a row."""
        operands = [self._vector(v) if v.tile.shape else self._scalar(v) for v in op.positions]
        return locate(op.access.dims[d].position, operands, [self._ranges.get(v) for v in op.positions])

    def _row_slices(self, op: MemoryOp, layout: Layout) -> list[RowSlice]:
        """The rows of an access, clamped into the array."""
        rows = _row_dims(layout)
        places: dict[int, Any] = {}
        for d in rows:
            dim = op.access.dims[d]
            places[d] = self._gather_places(op, d) if dim.kind == "gather" else self._position(op, d)
        row_slices: list[RowSlice] = []
        for number in product(*(range(op.access.dims[d].size) for d in rows)):
            index: dict[int, Any] = {}
            inside: Any = None
            for d, k in zip(rows, number, strict=True):
                dim, length = op.access.dims[d], op.ref.ref.shape[d]
                place = places[d][0, k] if dim.kind == "gather" else places[d] + np.int32(k)
                if not dim.in_bounds:
                    ok = (place >= 0) & (place < length)
                    inside = ok if inside is None else inside & ok
                    place = jnp.clip(place, 0, length - 1)
                index[d] = place
            row_slices.append(RowSlice(index, inside, number))
        return row_slices

    def _bounds_mask(self, op: MemoryOp, shape: tuple[int, ...]) -> Any:
        """The mask of the elements in bounds, a scalar for a scalar access; None if all are in bounds."""
        mask: Any = None
        index_ok: Any = None
        tile_dims = [d for d, dim in enumerate(op.access.dims) if dim.kind != "index"]
        for d, (dim, length) in enumerate(zip(op.access.dims, op.ref.ref.shape, strict=True)):
            if dim.in_bounds:
                continue
            if dim.kind == "index":
                place = self._position(op, d)
                ok = (place >= 0) & (place < length)
                index_ok = ok if index_ok is None else index_ok & ok
                continue
            at = len(shape) - len(tile_dims) + tile_dims.index(d)
            if dim.kind == "gather":
                place = row_along_dim(self._gather_places(op, d), shape, at)
                ok = (place >= 0) & (place < length)
            else:
                place, lane = self._position(op, d), lax.broadcasted_iota(jnp.int32, shape, at)
                ok = lane < np.int32(length) - place
                interval = self._interval(op, d)
                if interval is None or interval.low < 0:
                    ok = ok & (lane >= -place)
            mask = ok if mask is None else mask & ok
        if index_ok is None:
            return mask
        if op.access.shape == ():
            return index_ok
        whole = jnp.broadcast_to(jnp.where(index_ok, 1, 0), shape) != 0
        return whole if mask is None else mask & whole

    def _interval(self, op: MemoryOp, d: int) -> Interval | None:
        return position_interval(op.access.dims[d].position, [self._ranges.get(v) for v in op.positions])

    # --- writing ---

    def _write(self, op: WriteOp, value: Any, mask: Any, update: Callable[[Any, Any], Any]) -> None:
        layout = self._layouts[op]
        if layout is None or prod(op.access.shape) == 0:
            return
        ref = self._outputs[op.ref]
        guard = self._block_guard(op, layout)
        for row in self._row_slices(op, layout):
            part = self._row_part(op, layout, as_stored(value), row)
            chosen = None if mask is None else self._row_part(op, layout, as_stored(mask), row)

            def write(row: RowSlice = row, part: Any = part, chosen: Any = chosen) -> None:
                index = self._index(op, layout, row)
                old = ref[index] if chosen is not None or isinstance(op, Atomic) else None
                shape = indexed_shape(index, layout.buffer)
                new = update(old, with_shape(part, shape)).astype(ref.dtype)
                ref[index] = new if chosen is None else select_wide(with_shape(chosen, shape) != 0, new, old)

            when(*(c for c in (guard, row.inside) if c is not None))(write)

    def _row_part(self, op: WriteOp, layout: Layout, x: Any, row: RowSlice) -> Any:
        """The elements of a tile that belong to one row, clipped to the array along dims at constant positions."""
        dims = op.access.dims
        rows = _row_dims(layout)
        tile_dims = [d for d in range(len(dims)) if dims[d].kind != "index"]
        if any(d in rows for d in tile_dims):
            picks = (slice(row.number[rows.index(d)], row.number[rows.index(d)] + 1) for d in tile_dims if d in rows)
            index = [next(picks) if d in rows else slice(None) for d in tile_dims]
            x = x[tuple([slice(None)] * (x.ndim - len(tile_dims)) + index)]
        sizes = [dims[v.dim].size for v in _lane_dims(layout)]
        x = with_shape(x, (*[1] * (2 - len(sizes)), *sizes))
        cuts: list[slice] = []
        for view in _lane_dims(layout):
            low, high, before, _ = self._clipped_range(dims[view.dim], op.ref.ref.shape[view.dim])
            static = layout.window.dims[view.dim].kind == "static"
            cuts.append(slice(before, before + high - low) if static else slice(None))
        whole = all(c in (slice(None), slice(0, n)) for c, n in zip(cuts, sizes, strict=True))
        return x if whole else x[tuple([slice(None)] * (x.ndim - len(cuts)) + cuts)]

    def _block_guard(self, op: WriteOp, layout: Layout) -> Any:
        """True if the index map has not clamped the position of the block; None if it never clamps."""
        condition: Any = None
        for d, (dim, window_dim) in enumerate(zip(op.access.dims, layout.window.dims, strict=True)):
            if dim.in_bounds or window_dim.kind == "rows":
                continue
            length = op.ref.ref.shape[d]
            if window_dim.kind == "static":
                if dim.position.const >= length or dim.position.const + dim.size <= 0:
                    return jnp.zeros((), jnp.bool_)
                continue
            interval = self._interval(op, d)
            if interval is not None and interval.within(0, length - 1):
                continue
            place = self._position(op, d)
            ok = (place >= 0) & (place < length)
            condition = ok if condition is None else condition & ok
        return condition


def _row_dims(layout: Layout) -> list[int]:
    return [d for d, window_dim in enumerate(layout.window.dims) if window_dim.kind == "rows"]


def _lane_dims(layout: Layout) -> list[LayoutDim]:
    return [v for v in layout.dims if v.use in ("lane", "fold") and v.dim >= 0]


def combine(op: Atomic, old: Any, new: Any) -> Any:
    """Two elements combined by an atomic update, in 32 bits, and rounded once."""
    dtype: DType = np.dtype(old.dtype)
    wide, combined = wide_dtype(dtype), combiner(op.kind)
    if wide == dtype:
        return combined(old, new.astype(dtype))
    # MLIR would fold a maximum of widened operands into a narrow one, which Mosaic lacks.
    if kind_of(dtype) == "float":
        old, new = old.astype(wide), new.astype(wide)
        if op.kind in ("max", "min"):
            chosen = old > new if op.kind == "max" else old < new
            return jnp.where(chosen | (old != old), old, new).astype(dtype)
        return combined(old, new).astype(dtype)
    old, new = old.astype(I32), new.astype(I32)
    if op.kind in ("max", "min"):
        return (old + combined(new - old, 0)).astype(dtype)
    return combined(old, new).astype(dtype)
