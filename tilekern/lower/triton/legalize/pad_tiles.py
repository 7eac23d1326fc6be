"""Pad every tile to sizes that are powers of two, the only sizes that Triton has.

Needs: a verified Func. Gives: a Func with the same outputs, whose tiles have such sizes.

A tile grows at the end of each dim. The contents of the added lanes are unspecified, and may be NaN:

    load x[p +: 48]            → load x[p +: 64]             lanes beyond the array get the fill
    store y to x[p +: 48]      → store y to x[p +: 64] masked by lane < 48
    reduce x                   → reduce (select(lane < 48, x, identity))
    dot(x, y)                  → dot(x', y')                 along the contracted dims, added lanes are 0 on both sides
    slice, pad, concatenate, ...                             as gathers: see `Movement`

If a dot's operand is a load, a mask on the load makes the zeros. A select between the load and the dot would move the
tile to registers, but the tensor cores of sm_90 read it from shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Monoid, Reduce, Select, identity
from tilekern.ir.core import Block, Builder, Func, Op, Value, definitions, unknown_op
from tilekern.ir.debug import Assert, Print
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Dim, Load, MemoryOp, WriteOp
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DType, TileType
from tilekern.lower.triton.legalize.movement import Movement, padded, padded_size
from tilekern.lower.triton.legalize.padded_print import PaddedPrint

_Along = Reduce | ArgReduce | Scan | LinearScan | Sort | TopK


def pad_tiles(func: Func) -> Func:
    """Apply the rewrites above."""
    return _Padder(func).run()


class _Padder(Builder):
    def __init__(self, func: Func) -> None:
        super().__init__()
        self._func = func
        self._new: dict[Value, Value] = {}
        self._zeros = _ZeroLanes(func)

    def run(self) -> Func:
        return replace(self._func, body=self._block(self._func.body))

    # --- blocks ---

    def _block(self, block: Block) -> Block:
        args = tuple(Value(self._type(a), a.name) for a in block.args)

        def body(*_: Value) -> tuple[Value, ...]:
            self._new.update(zip(block.args, args, strict=True))
            for op in block.ops:
                self._visit(op)
            return tuple(self._value(v) for v in block.results)

        return self.block(args, body)

    def _type(self, value: Value) -> TileType:
        return TileType(padded(value.tile.shape), value.tile.dtype)

    def _value(self, value: Value) -> Value:
        return self._new.get(value, value)

    def _visit(self, op: Op) -> None:
        operands = tuple(self._value(v) for v in op.operands)
        if op.regions:
            regions = tuple(self._block(r) for r in op.regions)
            results: Sequence[Value] = self.add(op.copy(operands, regions))
        elif isinstance(op, MemoryOp):
            results = self._memory(op, operands)
        else:
            results = self._pure(op, operands)
        self._new.update(zip(op.results, results, strict=True))

    # --- memory ---

    def _memory(self, op: MemoryOp, operands: tuple[Value, ...]) -> Sequence[Value]:
        make = Make(self, op)
        dims = tuple(self._dim(d) for d in op.access.dims)
        access = replace(op.access, dims=dims)
        mask_index = op.leading + op.access.arity
        mask = operands[mask_index] if op.masked else None
        needed = self._masked_dims(op)
        for dim in needed:
            inside = self._inside(make, op.access.shape, dim)
            mask = inside if mask is None else make.of("and", mask, inside)
        masks = () if mask is None else (mask,)
        fills = operands[len(operands) - op.trailing :]
        return self.add(
            replace(op, access=access, masked=bool(masks), operands=(*operands[:mask_index], *masks, *fills))
        )

    def _dim(self, dim: Dim) -> Dim:
        """The padded dim; it is marked as in bounds only if it did not grow: a later pass may prove more."""
        size = padded_size(dim.size)
        return replace(dim, size=size, in_bounds=dim.in_bounds and size == dim.size)

    def _masked_dims(self, op: MemoryOp) -> list[int]:
        """The dims of the tile along which added lanes must be masked: neither read nor written, or read as 0."""
        outside = _ending_with_array(op)
        grown = [d for d, n in enumerate(op.access.shape) if padded_size(n) != n and d not in outside]
        if isinstance(op, WriteOp) or op.ref.ref.role != "in":
            return grown
        return [d for d in grown if d in self._zeros.of_load(op)]

    # --- pure ops ---

    def _pure(self, op: Op, operands: tuple[Value, ...]) -> Sequence[Value]:
        make = Make(self, op)
        movement = Movement(make)
        match op:
            case Constant():
                return [self._constant(op)]
            case Iota():
                return [self.one(replace(op, shape=padded(op.shape)))]
            case Broadcast():
                return [self.one(replace(op, operands=operands, shape=padded(op.shape)))]
            case Reshape():
                return [movement.reshape(operands[0], op.operands[0].tile.shape, op.shape)]
            case Reduce() | ArgReduce() | Scan() | LinearScan() | Sort() | TopK():
                return [self._along(make, op, operands)]
            case Dot():
                return [self._dot(make, op, operands)]
            case Slice() | Reverse() | Pad() | Concatenate() | DynamicSlice() | DynamicUpdateSlice() | Take():
                return [movement.of(op, operands)]
            case Print():
                shapes = tuple(v.tile.shape for v in op.operands)
                return self.add(PaddedPrint(operands=operands, format=op.format, shapes=shapes, loc=op.loc))
            case Assert():
                (held,) = op.operands
                return self.add(op.copy((self._filled(make, held, operands[0], range(len(held.tile.shape)), True),)))
            case Elementwise() | Select() | Convert() | Bitcast() | Transpose():
                return self.add(op.copy(operands))
            case _:
                raise unknown_op(op, __name__)

    def _constant(self, op: Constant) -> Value:
        """A constant, with zeros in the added lanes of an array."""
        shape, array = padded(op.shape), op.array
        if array.shape:
            array = np.zeros(shape, array.dtype)
            array[tuple(map(slice, op.shape))] = op.array
        return self.one(replace(op, array=array, shape=shape))

    def _inside(self, make: Make, shape: Sequence[int], dim: int) -> Value:
        """True in the lanes that the tile had before padding, along one dim."""
        whole = padded(shape)
        vector = make.of("lt", make.lanes((whole[dim],), 0), shape[dim])
        return make.along(vector, whole, dim)

    def _filled(self, make: Make, old: Value, x: Value, dims: Sequence[int], fill: Any) -> Value:
        """`x` with added lanes along `dims` set to `fill`."""
        shape = old.tile.shape
        for dim in dims:
            if padded_size(shape[dim]) != shape[dim]:
                inside = self._inside(make, shape, dim)
                x = make.select(inside, x, make.constant(np.asarray(fill, x.tile.dtype), x.tile))
        return x

    def _along(self, make: Make, op: _Along, operands: tuple[Value, ...]) -> Value:
        """Reductions, scans and sorts: added lanes get the identity, or the element that is sorted last."""
        if isinstance(op, Reduce):
            dims = op.dims
        elif isinstance(op, Scan | LinearScan) and not op.reverse:
            dims = ()
        else:
            dims = (op.dim,)
        pairs = zip(op.operands, operands, strict=True)
        filled = tuple(self._filled(make, old, x, dims, _neutral(op, x.tile.dtype)) for old, x in pairs)
        return make.again(replace(op, operands=filled, k=padded_size(op.k)) if isinstance(op, TopK) else op, *filled)

    def _dot(self, make: Make, op: Dot, operands: tuple[Value, ...]) -> Value:
        sides = list(operands)
        for side, old in enumerate(op.operands):
            dims = [d for d in op.contract[side] if not self._zeros.has(old, d)]
            sides[side] = self._filled(make, old, sides[side], dims, 0)
        return self.one(op.copy(tuple(sides)))


def _neutral(op: _Along, dtype: DType) -> Any:
    """The element of added lanes that changes no result; they lie behind all other lanes, also for a reversed scan."""
    match op:
        case ArgReduce():
            return identity(op.extreme, dtype)
        case Sort():
            return identity("min", dtype)
        case TopK():
            return identity("max", dtype)
        case Scan(monoid="logsumexp"):
            return -np.inf
        case LinearScan():
            return np.zeros((), dtype)  # both operands: the result stays 0
        case Reduce(monoid=monoid) | Scan(monoid=monoid):
            return identity(cast(Monoid, monoid), dtype)


def _ending_with_array(op: MemoryOp) -> set[int]:
    """The dims of the tile whose added lanes lie beyond the end of the array."""
    tile_dims = [(op.access.dims[n], op.extents[n]) for n in op.access.kept]
    return {
        number
        for number, (dim, size) in enumerate(tile_dims)
        if dim.kind == "block" and not dim.position.terms and dim.position.const + dim.size >= size
    }


class _ZeroLanes:
    """The dims of loads whose added lanes must read 0, because a dot contracts them."""

    def __init__(self, func: Func) -> None:
        self._definitions = definitions(func)
        self._of: dict[Value, set[int]] = {}
        for op in func.walk():
            if isinstance(op, Dot):
                for value, dims in zip(op.operands, op.contract, strict=True):
                    for dim in dims:
                        self._want(value, dim)

    def of_load(self, op: MemoryOp) -> set[int]:
        """The dims of a load's result."""
        return self._of.get(op.results[0], set()) if isinstance(op, Load) else set()

    def has(self, value: Value, dim: int) -> bool:
        """True if a value is 0 in the added lanes along a dim."""
        return self._source(value, dim) is not None

    def _want(self, value: Value, dim: int) -> None:
        source = self._source(value, dim)
        if source is not None:
            self._of.setdefault(source[0], set()).add(source[1])

    def _source(self, value: Value, dim: int) -> tuple[Value, int] | None:
        """The load of which a value is a transposition or a cast, and its dim that becomes `dim`; else None."""
        op = self._definitions.get(value)
        while isinstance(op, (Transpose, Convert)):
            if isinstance(op, Convert) and BOOL in (op.dtype, op.operands[0].tile.dtype):
                return None
            dim = op.permutation[dim] if isinstance(op, Transpose) else dim
            value = op.operands[0]
            op = self._definitions.get(value)
        return (value, dim) if isinstance(op, Load) and op.fill is None else None
