"""The ops that move elements: broadcast, reshape, transpose, iota, slice, concatenate, pad, reverse."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np

from tilekern.errors import VerifyError
from tilekern.ir.core import Array, Op, require, require_dims
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, DType, TileType


@record(eq=False, kw_only=True)
class Broadcast(Op):
    """Operand dim `d` becomes dim `dims[d]` of `shape`; size 1 is repeated, new dims too."""

    name: ClassVar[str] = "broadcast"

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        # Broadcasts are common: their messages are formatted only where a check fails.
        if len(self.dims) != len(tile.shape):
            raise VerifyError(f"broadcast of {tile} needs one dim each, got dims={self.dims}")
        require(list(self.dims) == sorted(set(self.dims)), f"broadcast dims must increase, got {self.dims}")
        require(all(0 <= d < len(self.shape) for d in self.dims), f"broadcast dims {self.dims} leave {self.shape}")
        if not all(n in (1, self.shape[d]) for n, d in zip(tile.shape, self.dims, strict=True)):
            raise VerifyError(f"{tile} does not broadcast to {self.shape} along {self.dims}")
        return (TileType(self.shape, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        (x,) = operands
        expanded = [1] * len(self.shape)
        for n, d in zip(x.shape, self.dims, strict=True):
            expanded[d] = n
        return np.broadcast_to(x.reshape(expanded), self.shape)


@record(eq=False, kw_only=True)
class Reshape(Op):
    """The elements of the operand, in row-major order, under another shape."""

    name: ClassVar[str] = "reshape"

    shape: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(prod(self.shape) == tile.size, f"{tile} cannot be reshaped to {self.shape}")
        return (TileType(self.shape, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0].reshape(self.shape)


@record(eq=False, kw_only=True)
class Transpose(Op):
    """Dim `d` of the result is dim `permutation[d]` of the operand."""

    name: ClassVar[str] = "transpose"

    permutation: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        fits = sorted(self.permutation) == list(range(len(tile.shape)))
        require(fits, f"{self.permutation} is no permutation of the dims of {tile}")
        return (TileType(tuple(tile.shape[d] for d in self.permutation), tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0].transpose(self.permutation)


@record(eq=False, kw_only=True)
class Iota(Op):
    """0, 1, 2, ... along dim `dim`."""

    name: ClassVar[str] = "iota"

    shape: tuple[int, ...]
    dtype: DType
    dim: int

    def infer(self) -> tuple[TileType, ...]:
        require(not self.operands, "iota takes no operand")
        require(0 <= self.dim < len(self.shape), f"iota along dim {self.dim} of {self.shape}")
        require(self.dtype != BOOL, f"iota does not accept {TileType(self.shape, self.dtype)}")
        return (TileType(self.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        shape = [1] * len(self.shape)
        shape[self.dim] = self.shape[self.dim]
        return np.broadcast_to(np.arange(self.shape[self.dim]).astype(self.dtype).reshape(shape), self.shape)


@record(eq=False, kw_only=True)
class Slice(Op):
    """Elements `start[d]`, `start[d] + stride[d]`, ... below `stop[d]` of every dim."""

    name: ClassVar[str] = "slice"

    start: tuple[int, ...]
    stop: tuple[int, ...]
    stride: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        lengths = {len(self.start), len(self.stop), len(self.stride), len(tile.shape)}
        require(len(lengths) == 1, f"slice of {tile} needs bounds for every dim")
        bounds = tuple(zip(self.start, self.stop, self.stride, strict=True))
        inside = all(0 <= a <= b <= n and s > 0 for (a, b, s), n in zip(bounds, tile.shape, strict=True))
        require(inside, f"slice {self.start}:{self.stop}:{self.stride} leaves {tile}")
        return (TileType(tuple(len(range(a, b, s)) for a, b, s in bounds), tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0][tuple(map(slice, self.start, self.stop, self.stride))]


@record(eq=False, kw_only=True)
class Concatenate(Op):
    """The operands one behind the other along dim `dim`."""

    name: ClassVar[str] = "concatenate"

    dim: int

    def infer(self) -> tuple[TileType, ...]:
        tiles = self.tiles()
        require(len(tiles) > 0, "concatenate takes at least one operand")
        other_dims = [(*t.shape[: self.dim], *t.shape[self.dim + 1 :], t.dtype) for t in tiles]
        require(0 <= self.dim < len(tiles[0].shape), f"concatenate along dim {self.dim} of {tiles[0]}")
        require(all(r == other_dims[0] for r in other_dims), "concatenate needs equal dtypes and other dims")
        shape = list(tiles[0].shape)
        shape[self.dim] = sum(t.shape[self.dim] for t in tiles)
        return (TileType(tuple(shape), tiles[0].dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return np.concatenate(operands, axis=self.dim)


@record(eq=False, kw_only=True)
class Pad(Op):
    """The first operand with `low`, `high` and `interior` elements of the second, a scalar, before, after and between.

    Negative `low` and `high` cut elements off.
    """

    name: ClassVar[str] = "pad"

    low: tuple[int, ...]
    high: tuple[int, ...]
    interior: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        tile, value = self.tiles(2)
        require(value == TileType((), tile.dtype), f"the padding value of {tile} must be a scalar, got {value}")
        lengths = {len(self.low), len(self.high), len(self.interior), len(tile.shape)}
        require(len(lengths) == 1, f"pad of {tile} needs amounts for every dim")
        amounts = tuple(zip(self.low, self.high, self.interior, strict=True))
        require(all(i >= 0 for i in self.interior), f"interior padding must not be negative, got {self.interior}")
        shape = tuple(lo + hi + n + max(n - 1, 0) * i for n, (lo, hi, i) in zip(tile.shape, amounts, strict=True))
        require(all(n >= 0 for n in shape), f"padding {tile} by {amounts} leaves a negative size")
        return (TileType(shape, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        x, value = operands
        spread = tuple(n + max(n - 1, 0) * i for n, i in zip(x.shape, self.interior, strict=True))
        low, high = (tuple(max(n, 0) for n in amounts) for amounts in (self.low, self.high))
        grown = np.full(tuple(map(sum, zip(low, spread, high, strict=True))), value, x.dtype)
        inside = zip(low, spread, self.interior, strict=True)
        grown[tuple(slice(lo, lo + n, i + 1) for lo, n, i in inside)] = x
        cut = (slice(max(-lo, 0), n - max(-hi, 0)) for lo, hi, n in zip(self.low, self.high, grown.shape, strict=True))
        return grown[tuple(cut)]


@record(eq=False, kw_only=True)
class Reverse(Op):
    """The elements in opposite order along `dims`."""

    name: ClassVar[str] = "reverse"

    dims: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require_dims(self.dims, tile)
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        return np.flip(operands[0], self.dims)
