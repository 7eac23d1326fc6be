"""Valid lanes of values, lanes that come from inside of arrays: one rule for each pure op.

A load without a fill reads 0 in lanes that are out of bounds or masked. These lanes are *invalid*, and so are lanes
computed from invalid lanes:

    elementwise, convert, bitcast   valid where all operands are
    stated derivatives              as the first operand, the value itself
    a and b, a or b of bools        valid also where one operand is valid, and decides
    select(p, a, b)                 valid where p and the operand chosen by p are
    ops that move elements          as the element that is moved, or as the scalar that is filled in
    reduce, arg-reduce, dot         valid where any of the combined elements is
    scan                            as the lane itself, whatever the lanes before it are
    sort, top-k                     as the element that comes to the lane, and its keys

Constants are valid. Scalars that select a place, such as the starts of a dynamic slice, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Hoist
from tilekern.ir.core import Builder, Op, Value, unknown_op
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, TileType

Valid = Value | None
"""The valid lanes of a value, a bool tile of its shape; None if all are."""


def sources(op: Op) -> tuple[Value, ...]:
    """The operands of a pure op that decide about the valid lanes of its result."""
    match op:
        case DynamicSlice() | Custom():
            return op.operands[:1]
        case DynamicUpdateSlice():
            return op.operands[:2]
        case Sort():
            return (*op.operands[: op.num_keys], op.operands[op.pick])
        case Reduce() | Dot() if any(v.tile.size == 0 for v in op.operands):
            return ()  # the identity of the reduction
        case _ if isinstance(op, (*_LANE_BY_LANE, *_MOVED, Reduce, ArgReduce, Scan, LinearScan, TopK, Dot, Hoist)):
            return op.operands
        case _:
            raise unknown_op(op, __name__)


_LANE_BY_LANE = (Elementwise, Select, Convert, Bitcast, Stop, Constant, Iota)
_MOVED = (Broadcast, Reshape, Transpose, Slice, Reverse, Concatenate, Pad, Take)


class Validity(Make):
    """Makes the ops that compute which lanes are valid, on behalf of one op of the user's."""

    def __init__(self, builder: Builder, origin: Op) -> None:
        super().__init__(builder, origin)
        self._op = origin

    def of_result(self, valid: Sequence[Valid]) -> Valid:
        """The valid lanes of the result of the op, which is pure, from the valid lanes of its operands."""
        match op := self._op:
            case Elementwise(function="and" | "or") if op.result.tile.dtype == BOOL:
                return self._decided(op, *valid)
            case Select():
                return self._chosen(op, *valid)
            case Broadcast() | Reshape() | Transpose() | Slice() | Reverse() | DynamicSlice():
                return self._moved(*valid[:1], *op.operands[1:])
            case Concatenate() | Pad() | DynamicUpdateSlice():
                moved = len(sources(op))
                return self._moved(*map(self.whole, valid[:moved], op.operands), *op.operands[moved:])
            case Take():
                return self._taken(op, *valid)
            case Reduce():
                return self._any(valid[0], op.dims)
            case ArgReduce():
                return self._any(valid[0], (op.dim,))
            case Scan():
                return valid[0]
            case Sort():
                return self._sorted(op, valid)
            case TopK():
                return None if valid[0] is None else self.add(Take, valid[0], op.result, dim=op.dim, along=True)
            case Dot():
                return self.all(self._side(op, 0, valid[0]), self._side(op, 1, valid[1]))
            case LinearScan() | Custom():
                return self.all(*valid)
            case _ if isinstance(op, _LANE_BY_LANE):
                return self.all(*valid)
            case _:
                raise unknown_op(op, __name__)

    def whole(self, valid: Valid, value: Value) -> Value:
        """The valid lanes of a value as a tile, even if all lanes are valid."""
        return self.number(True, TileType(value.tile.shape, BOOL)) if valid is None else valid

    def all(self, *conditions: Valid) -> Valid:
        """The conjunction of conditions; None stands for a condition that holds in all lanes."""
        conjunction: Valid = None
        for condition in conditions:
            if condition is not None and condition is not conjunction:
                conjunction = condition if conjunction is None else self.of("and", conjunction, condition)
        return conjunction

    def _moved(self, *operands: Valid) -> Valid:
        """The op itself, on valid lanes in the place of values."""
        valid_operands = tuple(v for v in operands if v is not None)
        return self._builder.one(self._op.copy(valid_operands)) if len(valid_operands) == len(operands) else None

    def _decided(self, op: Elementwise, left: Valid, right: Valid) -> Valid:
        """The lanes of `a and b` (`a or b`) where both operands are valid, or one is valid and false (true)."""
        a, b = (self.of("not", v) if op.function == "and" else v for v in op.operands)
        if left is None or right is None:
            partial, decides = (right, a) if left is None else (left, b)
            return None if partial is None else self.of("or", partial, decides)
        valid_lanes = self.of("and", left, right)
        for valid, decides in ((left, a), (right, b)):
            valid_lanes = self.of("or", valid_lanes, self.of("and", valid, decides))
        return valid_lanes

    def _chosen(self, op: Select, predicate: Valid, on_true: Valid, on_false: Valid) -> Valid:
        condition = op.operands[0]
        if on_true is None or on_false is None:
            if_true = None if on_true is None else self.of("or", on_true, self.of("not", condition))
            if_false = None if on_false is None else self.of("or", on_false, condition)
            return self.all(predicate, if_true, if_false)
        return self.all(predicate, self.add(Select, condition, on_true, on_false))

    def _taken(self, op: Take, valid: Valid, indices: Valid) -> Valid:
        moved = None if valid is None else self.add(Take, valid, op.operands[1], dim=op.dim, along=op.along)
        if indices is not None and not op.along:
            rank = len(indices.tile.shape)
            indices = self.broadcast(indices, op.result.tile.shape, tuple(range(op.dim, op.dim + rank)))
        return self.all(moved, indices)

    def _any(self, valid: Valid, dims: tuple[int, ...]) -> Valid:
        return self.add(Reduce, valid, monoid="or", dims=dims) if valid is not None and dims else valid

    def _sorted(self, op: Sort, valid: Sequence[Valid]) -> Valid:
        """The valid lanes of an element and of its keys, sorted along with the element."""
        valid_lanes = self.all(*valid[: op.num_keys], valid[op.pick])
        if valid_lanes is None:
            return None
        return self.add(Sort, *op.operands, valid_lanes, dim=op.dim, num_keys=op.num_keys, pick=len(op.operands))

    def _side(self, op: Dot, side: Literal[0, 1], valid: Valid) -> Valid:
        """The valid lanes of one operand, in the place of its dims in the result."""
        if valid is None:
            return None
        batch, free = op.batch[side], op.free(side)
        free_dims = [d for d in range(len(valid.tile.shape)) if d not in op.contract[side]]
        order = tuple(free_dims.index(d) for d in (*batch, *free))
        combined = self._any(valid, op.contract[side])
        assert combined is not None
        moved = self.add(Transpose, combined, permutation=order)
        begin = len(batch) + side * len(op.free(0))
        return self.broadcast(moved, op.result.tile.shape, (*range(len(batch)), *range(begin, begin + len(free))))
