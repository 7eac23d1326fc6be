"""A short notation for making ops, for rewrites that replace one op by many."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Reduce, Select, splat
from tilekern.ir.constants import integer_of
from tilekern.ir.core import Block, Builder, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import I32, DType, TileType, is_float8, kind_of
from tilekern.source import UNKNOWN

Number = Value | int | float | bool


class Make:
    """Adds ops to a builder, all on behalf of one op of the user's, or of none.

    Emitted source names values after the variables in the user's line. Ops without a line leave these names alone. A
    number among the operands stands for a tile of this number, of the type of the operand that is a value.
    """

    def __init__(self, builder: Builder, origin: Op | None = None) -> None:
        self._builder, self._loc = builder, UNKNOWN if origin is None else origin.loc

    def known(self, x: Value) -> int | None:
        """The number in all lanes of an integer tile; None if it is not known."""
        return integer_of(x, self._builder) if isinstance(self._builder, Rewriter) else None

    def add(self, op: type[Op], *operands: Value, **attributes: Any) -> Value:
        """Add an op with one result, and return the result."""
        return self._builder.one(op(operands=operands, loc=self._loc, **attributes))

    def again(self, op: Op, *operands: Value) -> Value:
        """Add a copy of an op with one result, on other operands, and return the result."""
        return self._builder.one(op.copy(operands))

    def inline(self, block: Block, *args: Value) -> tuple[Value, ...]:
        """Add a copy of the ops of a block, applied to other arguments, and return the values that it yields."""
        cloner = Cloner()
        copy = cloner.block((), lambda: cloner.inline(block, args))
        for op in copy.ops:
            self._builder.add(op)
        return copy.results

    def of(self, function: str, *operands: Number) -> Value:
        """The result of an elementwise op, by the name of its function."""
        return self.add(Elementwise, *self._alike(operands), function=function)

    def select(self, predicate: Value, on_true: Number, on_false: Number) -> Value:
        """`on_true` where `predicate` holds, else `on_false`; 8-bit floats by their bits: few machines select them."""
        operands = self._alike((on_true, on_false))
        dtype = operands[0].tile.dtype
        if is_float8(dtype):
            return self.bitcast(self.select(predicate, *map(self.bits, operands)), dtype)
        return self.add(Select, predicate, *operands)

    def number(self, number: Any, tile: TileType) -> Value:
        """A tile of one number."""
        return self._builder.one(splat(np.asarray(number).astype(tile.dtype), tile, loc=self._loc))

    def constant(self, array: Any, tile: TileType) -> Value:
        """A tile of one element, given as an array of shape ()."""
        return self.add(Constant, array=array, shape=tile.shape)

    def convert(self, x: Value, dtype: DType) -> Value:
        """A cast that the target has; `x` itself if it has the dtype."""
        return x if x.tile.dtype == dtype else self.add(Convert, x, dtype=dtype)

    def bitcast(self, x: Value, dtype: DType) -> Value:
        """The bits of `x` as another dtype of the same width."""
        return x if x.tile.dtype == dtype else self.add(Bitcast, x, dtype=dtype)

    def bits(self, x: Value, signed: bool = False) -> Value:
        """The bits of numbers as integers of the same width."""
        dtype = np.dtype(f"{'i' if signed else 'u'}{x.tile.dtype.itemsize}")
        return self.bitcast(x, dtype) if kind_of(x.tile.dtype) != "bool" else x

    def reduce(self, x: Value, monoid: str, dim: int) -> Value:
        """The reduction along `dim`."""
        return self.add(Reduce, x, monoid=monoid, dims=(dim,))

    # --- shapes ---

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """The elements of `x`, in row-major order, under another shape."""
        return x if x.tile.shape == shape else self.add(Reshape, x, shape=shape)

    def transpose(self, x: Value, permutation: tuple[int, ...]) -> Value:
        """`x` with dims in another order: dim `d` of the result is dim `permutation[d]`."""
        if permutation == tuple(range(len(permutation))):
            return x
        return self.add(Transpose, x, permutation=permutation)

    def broadcast(self, x: Value, shape: tuple[int, ...], dims: tuple[int, ...]) -> Value:
        """`x` repeated to `shape`: its dim `d` becomes dim `dims[d]`."""
        return x if x.tile.shape == shape else self.add(Broadcast, x, shape=shape, dims=dims)

    def lanes(self, shape: tuple[int, ...], dim: int) -> Value:
        """The index of each lane along `dim`, int32."""
        vector = self.add(Iota, shape=(shape[dim],), dtype=I32, dim=0)
        return self.broadcast(vector, shape, (dim,))

    def along(self, vector: Value, shape: tuple[int, ...], dim: int) -> Value:
        """A vector along `dim`, repeated along all other dims."""
        return self.broadcast(vector, shape, (dim,))

    def part(self, x: Value, dim: int, start: int, stop: int) -> Value:
        """The elements from `start` to `stop` along `dim`."""
        shape = x.tile.shape
        if (start, stop) == (0, shape[dim]):
            return x
        starts, stops = [0] * len(shape), list(shape)
        starts[dim], stops[dim] = start, stop
        return self.add(Slice, x, start=tuple(starts), stop=tuple(stops), stride=(1,) * len(shape))

    def joined(self, dim: int, *tiles: Value) -> Value:
        """The concatenation of tiles along `dim`; tiles without elements are left out."""
        filled = [x for x in tiles if x.tile.shape[dim]] or list(tiles[:1])
        return filled[0] if len(filled) == 1 else self.add(Concatenate, *filled, dim=dim)

    def take(self, x: Value, indices: Value, dim: int) -> Value:
        """Elements at indices along `dim`, each from the line of its index; the indices must be in bounds."""
        return self.add(Take, x, indices, dim=dim, along=True)

    def _alike(self, operands: tuple[Number, ...]) -> tuple[Value, ...]:
        tile = next(v.tile for v in operands if isinstance(v, Value))
        return tuple(v if isinstance(v, Value) else self.number(v, tile) for v in operands)
