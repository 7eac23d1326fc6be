"""Dependence of results on the places where tiles of an axis begin: ops that combine lanes along it.

A value has *lanes* of an axis along those dims of its tile that come from the array's dim that the axis cuts. Ops on
each lane by itself do not see where tiles begin. A sum over the lanes is a part of a sum over all, as long as only
linear ops follow; anything else that combines lanes, as the maximum of a tile, depends on which lanes are in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilekern.ir.analysis.additive import is_linear, is_zero
from tilekern.ir.carries import carries
from tilekern.ir.compute import Bitcast, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value, definitions
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp, WriteOp
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Pad, Reshape, Reverse, Slice, Transpose

# For each tile with lanes of the axis, the dims along which they are.
type Lanes = dict[Value, frozenset[int]]


def depends_on_tiles(func: Func, indices: Collection[Value], dims: Collection[tuple[Value, int]]) -> bool:
    """True unless the tiles of an axis may begin anywhere without a change of results.

    Args:
      func: the Func.
      indices: those of the axis: of the grid, or of folds.
      dims: the dims of arrays that the axis cuts.
    """
    return _Lanes(func, indices, dims).run()


class _Combined(Exception):
    """An op combines lanes."""


class _Lanes:
    def __init__(self, func: Func, indices: Collection[Value], dims: Collection[tuple[Value, int]]) -> None:
        self._func, self._indices, self._dims = func, {*indices}, {*dims}
        self._defined = definitions(func)
        self._is_of_grid = not self._indices.isdisjoint(func.body.args)
        self._lanes: Lanes = {}
        # Sums over lanes, and what is linear in them; and carries that begin at 0, which may be.
        self._sums: set[Value] = set()
        self._zeros: set[Value] = set()
        self._positions: set[Value] = {*self._indices}

    def run(self) -> bool:
        """True if lanes are combined by more than sums."""
        try:
            while True:
                before = len(self._lanes), len(self._sums), sum(map(len, self._lanes.values()))
                self._block(self._func.body)
                if before == (len(self._lanes), len(self._sums), sum(map(len, self._lanes.values()))):
                    return False
        except _Combined:
            return True

    def _block(self, block: Block) -> None:
        for op in block.ops:
            self._op(op)

    def _op(self, op: Op) -> None:
        if isinstance(op, (Fold, While)):
            self._loop(op)
        elif isinstance(op, Switch):
            self._none_of(op.operands)
            for region in op.regions:
                self._block(region)
                for result, value in zip(op.results, region.results, strict=True):
                    self._like(result, value)
        elif isinstance(op, Load):
            self._load(op)
        elif isinstance(op, WriteOp):
            self._write(op)
        elif op.results:
            self._pure(op)

    def _none_of(self, values: Sequence[Value]) -> None:
        """Refuse values with lanes, or sums of them, where something else is decided."""
        if any(self._lanes.get(v) or v in self._sums for v in values):
            raise _Combined

    def _mark(self, value: Value, dims: Collection[int]) -> None:
        if dims:
            self._lanes[value] = self._lanes.get(value, frozenset()) | frozenset(dims)

    def _like(self, value: Value, other: Value) -> None:
        """Mark a value as another one of its type is."""
        self._mark(value, self._lanes.get(other, ()))
        if other in self._sums:
            self._sums.add(value)

    def _loop(self, op: Fold | While) -> None:
        for carry in carries(op):
            if is_zero(carry.init, self._defined):
                self._zeros.update(carry.args)
            elif carry.result in self._sums and carry.init not in self._sums:
                raise _Combined
            for arg in (*carry.args, carry.result):
                self._like(arg, carry.init)
                self._like(arg, carry.yielded)
        for region in op.regions:
            self._block(region)
        if isinstance(op, While):
            self._none_of(op.condition.results)

    def _load(self, op: Load) -> None:
        self._mark(op.result, self._along(op))
        for dim, lane in zip(op.access.dims, op.access.lanes, strict=True):
            positions = [op.positions[t.operand] for t in dim.position.terms]
            if self._sums.intersection(positions):
                raise _Combined
            if lane is not None and any(self._lanes.get(v) for v in positions):
                self._mark(op.result, [lane])
        if op.mask is not None:
            self._like(op.result, op.mask)
        if op.fill is not None:
            self._none_of([op.fill])

    def _along(self, op: MemoryOp) -> list[int]:
        """The dims of an access's tile that are lanes of the axis."""
        lanes = op.access.lanes
        found = ((n, lane) for n, lane in enumerate(lanes) if (op.ref, n) in self._dims)
        return [lane for n, lane in found if lane is not None and op.access.dims[n].kind == "block"]

    def _write(self, op: WriteOp) -> None:
        self._none_of(op.positions)
        along = frozenset(self._along(op))
        if not self._lanes.get(op.value, frozenset()) <= along:
            raise _Combined
        if self._is_of_grid:
            # A sum over the lanes of one tile is a part of a sum over tiles, and tells where tiles begin elsewhere.
            is_divided = any((op.ref, n) in self._dims for n in range(len(op.access.dims)))
            if is_divided == (op.value in self._sums):
                raise _Combined

    def _pure(self, op: Op) -> None:
        if not self._sums.isdisjoint(op.operands):
            if isinstance(op, Elementwise) and op.function == "add":
                self._sums.update(self._zeros.intersection(op.operands))
            if not is_linear(op, self._sums):
                raise _Combined
            self._sums.add(op.result)
        if not self._positions.isdisjoint(op.operands) and isinstance(op, (Elementwise, Broadcast, Reshape, Transpose)):
            self._position(op)
        lanes = [self._lanes.get(v, frozenset[int]()) for v in op.operands]
        if any(lanes):
            self._mark(op.result, self._moved(op, lanes))

    def _position(self, op: Op) -> None:
        """Mark the positions of lanes: what comes from the index, and differs along a tile."""
        self._positions.add(op.result)
        if any(v.tile.shape and v not in self._positions for v in op.operands):
            self._mark(op.result, [d for d, size in enumerate(op.result.tile.shape) if size > 1])

    def _moved(self, op: Op, lanes: Sequence[frozenset[int]]) -> Collection[int]:
        """The dims of a result that are lanes of the axis.

        Raises:
          _Combined: the op combines lanes, but as a sum.
        """
        match op:
            case Elementwise() | Select() | Convert() | Bitcast():
                return frozenset[int]().union(*(s for s, v in zip(lanes, op.operands, strict=True) if v.tile.shape))
            case Stop() | Custom():  # the value is the first operand; a rule is for derivatives
                return lanes[0]
            case Broadcast():
                return [op.dims[d] for d in lanes[0]]
            case Transpose():
                return [n for n, d in enumerate(op.permutation) if d in lanes[0]]
            case Reshape():
                return _reshaped(op.operands[0].tile.shape, op.result.tile.shape, lanes[0])
            case Reduce():
                if lanes[0].intersection(op.dims):
                    self._sum(op, op.monoid == "sum")
                kept = [d for d in range(len(op.operands[0].tile.shape)) if d not in op.dims]
                return [n for n, d in enumerate(kept) if d in lanes[0]]
            case Dot():
                return self._dot(op, lanes)
            case Scan() | LinearScan() | Sort() | TopK() if all(op.dim not in s for s in lanes):
                return frozenset[int]().union(*lanes)
            case ArgReduce() if op.dim not in lanes[0]:
                return [d - (d > op.dim) for d in lanes[0]]
            case Slice() | Pad() | Reverse() | Concatenate() | DynamicSlice() if _keeps(op, lanes):
                return frozenset[int]().union(*lanes)
            case Take() if op.along and all(op.dim not in s for s in lanes):
                return lanes[0] | lanes[1]
            case Take() if op.dim not in lanes[0] and not lanes[1]:
                more = len(op.operands[1].tile.shape) - 1
                return [d + more * (d > op.dim) for d in lanes[0]]
            case _:
                raise _Combined

    def _sum(self, op: Op, is_sum: bool) -> None:
        if not is_sum:
            raise _Combined
        self._sums.add(op.result)

    def _dot(self, op: Dot, lanes: Sequence[frozenset[int]]) -> list[int]:
        contracted = [not s.isdisjoint(dims) for s, dims in zip(lanes, op.contract, strict=True)]
        if any(contracted):
            self._sum(op, True)
        left = [*op.batch[0], *op.free(0)]
        found = [n for n, d in enumerate(left) if d in lanes[0]]
        found += [n for n, d in enumerate(op.batch[1]) if d in lanes[1]]
        return [*found, *(len(left) + n for n, d in enumerate(op.free(1)) if d in lanes[1])]


def _keeps(op: Op, lanes: Sequence[frozenset[int]]) -> bool:
    """True if an op that moves elements leaves those along the lanes where they are."""
    along = frozenset[int]().union(*lanes)
    shape = op.operands[0].tile.shape
    match op:
        case Slice() | DynamicSlice():
            return all(op.result.tile.shape[d] == shape[d] for d in along)
        case Pad():
            return all(op.low[d] == op.high[d] == op.interior[d] == 0 for d in along)
        case Reverse():
            return along.isdisjoint(op.dims)
        case Concatenate():
            return op.dim not in along
        case _:
            return False


def _reshaped(shape: Sequence[int], into: Sequence[int], lanes: Collection[int]) -> set[int]:
    """The dims of a reshaped tile that share elements' places with some dims of the tile."""
    found: set[int] = set()
    first = second = 0
    while first < len(shape) or second < len(into):
        begin, beside = first, second
        size, other = (shape[first] if first < len(shape) else 1), (into[second] if second < len(into) else 1)
        first, second = first + 1, second + 1
        while size != other:
            if size < other:
                size, first = size * shape[first], first + 1
            else:
                other, second = other * into[second], second + 1
        if any(begin <= d < first for d in lanes):
            found.update(range(beside, min(second, len(into))))
    return found
