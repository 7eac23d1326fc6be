"""The ops that move elements to or from computed places of a tile: dynamic slice and update, take.

No computed place is out of bounds: it is clamped, as in `jax.lax.dynamic_slice`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tilekern.ir.core import Array, Op, Value, require, require_dims
from tilekern.ir.records import record
from tilekern.ir.types import I32, INDEX, TileType


def _check_starts(starts: tuple[Value, ...], tile: TileType, sizes: tuple[int, ...], name: str) -> None:
    require(all(v.type == INDEX for v in starts), f"the starts of a {name} must be int32 scalars")
    fits = len(starts) == len(sizes) == len(tile.shape)
    require(fits, f"{name} of {tile} needs a start and a size for every dim, got {len(starts)} and {sizes}")
    inside = all(0 <= size <= n for size, n in zip(sizes, tile.shape, strict=True))
    require(inside, f"a {name} of sizes {sizes} does not fit into {tile}")


def _window(shape: tuple[int, ...], sizes: tuple[int, ...], starts: tuple[Array, ...]) -> tuple[slice, ...]:
    """The slices of `sizes` elements at `starts`, shifted so that all elements exist."""
    first = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(s, s + size) for s, size in zip(first, sizes, strict=True))


@record(eq=False, kw_only=True)
class DynamicSlice(Op):
    """`sizes` elements of the first operand from a start on; the other operands are the starts, one int32 a dim."""

    name: ClassVar[str] = "dynamic_slice"

    sizes: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        tile, *_ = self.tiles()
        _check_starts(self.operands[1:], tile, self.sizes, self.name)
        return (TileType(self.sizes, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        x, *starts = operands
        return x[_window(x.shape, self.sizes, tuple(starts))]


@record(eq=False, kw_only=True)
class DynamicUpdateSlice(Op):
    """The first operand, the second in place of its elements from a start on; then the starts, one int32 a dim."""

    name: ClassVar[str] = "dynamic_update_slice"

    def infer(self) -> tuple[TileType, ...]:
        require(len(self.operands) >= 2, "dynamic_update_slice takes a tile and what replaces a part of it")
        tile, update, *_ = self.tiles()
        require(tile.dtype == update.dtype, f"dynamic_update_slice of {tile} by {update}")
        _check_starts(self.operands[2:], tile, update.shape, self.name)
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        x, update, *starts = operands
        result = x.copy()
        result[_window(x.shape, update.shape, tuple(starts))] = update
        return result


@record(eq=False, kw_only=True)
class Take(Op):
    """The elements of the first operand at int32 indices (the second, clamped) along `dim`.

    The dims of the indices stand in the place of `dim`, as in `np.take`. If `along`, the operands have equal shapes but
    for `dim`, and each index picks from its own line, as in `np.take_along_axis`.
    """

    name: ClassVar[str] = "take"

    dim: int
    along: bool = False

    def infer(self) -> tuple[TileType, ...]:
        tile, indices = self.tiles(2)
        require(indices.dtype == I32, f"take needs int32 indices, got {indices}")
        require_dims((self.dim,), tile)
        require(tile.shape[self.dim] > 0, f"take from {tile} along dim {self.dim}, which has no element")
        outer, inner = tile.shape[: self.dim], tile.shape[self.dim + 1 :]
        if not self.along:
            return (TileType((*outer, *indices.shape, *inner), tile.dtype),)
        fits = len(indices.shape) == len(tile.shape) and (
            (*indices.shape[: self.dim], *indices.shape[self.dim + 1 :]) == (*outer, *inner)
        )
        require(fits, f"take along dim {self.dim} of {tile} by {indices}")
        return (TileType(indices.shape, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        x, indices = operands
        if not self.along:
            return np.take(x, indices, axis=self.dim, mode="clip")
        return np.take_along_axis(x, np.clip(indices, 0, x.shape[self.dim] - 1), self.dim)
