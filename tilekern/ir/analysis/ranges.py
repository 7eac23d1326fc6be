"""Interval analysis: two bounds for all elements of an integer or bool value.

A bool counts as 0..1, and the interval of a tile covers all of its lanes. `transfer` gives one op's interval from the
intervals of its operands, `analyze` the intervals of a whole Func. An unknown interval is None (for a bool: 0..1). An
interval that the dtype cannot hold is unknown, too: arithmetic that may wrap around proves nothing.

An interval whose `low` exceeds its `high` is empty: the value never exists. An example is the index of a fold that runs
no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import TypeGuard
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from tilekern.ir.compute import Constant, Convert, Reduce, Select
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Dim, MemoryOp, Position, Term
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DType, TileType, kind_of


@record
class Interval:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def empty(self) -> bool:
        """True if no integer lies inside."""
        return self.low > self.high

    @property
    def known(self) -> bool:
        """True if exactly one integer lies inside."""
        return self.low == self.high

    def within(self, low: int, high: int) -> bool:
        """True if the whole interval lies in `low`..`high`."""
        return low <= self.low and self.high <= high

    def plus(self, other: Interval) -> Interval:
        """All sums of an integer of this interval and an integer of `other`."""
        return Interval(self.low + other.low, self.high + other.high)

    def times(self, factor: int) -> Interval:
        """The interval of `factor` times each integer."""
        return Interval(*sorted((self.low * factor, self.high * factor)))


TRUE, FALSE, EITHER = Interval(1, 1), Interval(0, 0), Interval(0, 1)
INT32 = Interval(-(2**31), 2**31 - 1)


@cache
def whole(dtype: DType) -> Interval | None:
    """The interval of all numbers that an integer or bool dtype can hold; None for floats."""
    if dtype == BOOL:
        return EITHER
    if kind_of(dtype) == "float":
        return None
    limits = ml_dtypes.iinfo(dtype)
    return Interval(int(limits.min), int(limits.max))


def hull(*intervals: Interval) -> Interval:
    """The least interval that covers all intervals."""
    return Interval(min(i.low for i in intervals), max(i.high for i in intervals))


# --- one op --------------------------------------------------------------------------------------------------------


def transfer(op: Op, operands: Sequence[Interval | None]) -> Interval | None:
    """The interval of the result of a pure op with one result, from the intervals of its operands."""
    tile = op.result.tile
    limits = whole(tile.dtype)
    if limits is None:
        return None
    # A value that never exists may have any interval; the rules may count on low <= high.
    intervals = [whole(v.tile.dtype) if i is None or i.empty else i for v, i in zip(op.operands, operands, strict=True)]
    interval = _exact(op, intervals)
    if interval is None or not interval.within(limits.low, limits.high):
        interval = limits
    return None if interval == limits and tile.dtype != BOOL else interval


def _exact(op: Op, operands: Sequence[Interval | None]) -> Interval | None:
    """The interval in exact arithmetic. Each operand of integer or bool dtype has an interval: at worst its dtype's."""
    match op:
        case Constant():
            return _of_array(op)
        case Iota():
            return Interval(0, op.shape[op.dim] - 1)
        case Elementwise():
            return _elementwise(op, operands) if _all_known(operands) else None
        case Select():
            return _select(operands)
        case Convert():
            return _convert(op, operands[0])
        case Broadcast() | Reshape() | Transpose() | Slice() | Reverse():
            return operands[0]
        case Concatenate() | Pad():
            return hull(*operands) if _all_known(operands) else None
        case Reduce():
            return _reduce(op, operands[0])
        case _:
            return None


def _all_known(intervals: Sequence[Interval | None]) -> TypeGuard[Sequence[Interval]]:
    return all(i is not None for i in intervals)


def _of_array(op: Constant) -> Interval | None:
    return Interval(int(op.array.min()), int(op.array.max())) if op.array.size else None


def _select(operands: Sequence[Interval | None]) -> Interval | None:
    predicate, on_true, on_false = operands
    if predicate == TRUE:
        return on_true
    if predicate == FALSE:
        return on_false
    return hull(on_true, on_false) if on_true and on_false else None


def _convert(op: Convert, x: Interval | None) -> Interval | None:
    if x is None or op.dtype != BOOL:
        return x
    return _not_equal(x, FALSE)


def _reduce(op: Reduce, x: Interval | None) -> Interval | None:
    shape = op.operands[0].tile.shape
    count = int(np.prod([shape[d] for d in op.dims], dtype=np.int64))
    if x is None or count == 0:
        return None
    if op.monoid == "sum":
        return Interval(x.low * count, x.high * count)
    if op.monoid in ("max", "min") or (op.result.tile.dtype == BOOL and op.monoid != "xor"):
        return x
    return None


def _elementwise(op: Elementwise, operands: Sequence[Interval]) -> Interval | None:
    dtype = op.operands[0].tile.dtype
    match operands:
        case [x] if op.function in _UNARY:
            return _UNARY[op.function](x)
        case [x] if op.function == "not":
            return _not(dtype, x)
        case [x, y] if op.function in _BINARY:
            return _BINARY[op.function](x, y)
        case [x, y] if op.function in _BITWISE:
            return _BITWISE[op.function](dtype, x, y)
        case _:
            return None


def _corners(function: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """The interval of the results of a function that is monotone in each operand while the other is constant."""

    def corners(x: Interval, y: Interval) -> Interval:
        values = [function(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
        return Interval(min(values), max(values))

    return corners


def _toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _divide(x: Interval, y: Interval) -> Interval | None:
    # Division by zero is unspecified, so a divisor that may be zero proves nothing.
    return None if y.low <= 0 <= y.high else _corners(_toward_zero)(x, y)


def _remainder(x: Interval, y: Interval) -> Interval | None:
    if y.low <= 0 <= y.high:
        return None
    smallest, largest = sorted((abs(y.low), abs(y.high)))
    if x.within(1 - smallest, smallest - 1):
        return x
    return Interval(max(min(x.low, 0), 1 - largest), min(max(x.high, 0), largest - 1))


def _absolute(x: Interval) -> Interval:
    if x.low <= 0 <= x.high:
        return Interval(0, max(-x.low, x.high))
    return Interval(*sorted((abs(x.low), abs(x.high))))


def _truth(always: bool, never: bool) -> Interval:
    return TRUE if always else FALSE if never else EITHER


def _less(x: Interval, y: Interval) -> Interval:
    return _truth(x.high < y.low, x.low >= y.high)


def _less_equal(x: Interval, y: Interval) -> Interval:
    return _truth(x.high <= y.low, x.low > y.high)


def _equal(x: Interval, y: Interval) -> Interval:
    return _truth(x.known and x == y, x.high < y.low or y.high < x.low)


def _not_equal(x: Interval, y: Interval) -> Interval:
    equal = _equal(x, y)
    return Interval(1 - equal.high, 1 - equal.low)


def _sign(a: int) -> int:
    return (a > 0) - (a < 0)


_UNARY: dict[str, Callable[[Interval], Interval]] = {
    "neg": lambda x: Interval(-x.high, -x.low),
    "abs": _absolute,
    "sign": lambda x: Interval(_sign(x.low), _sign(x.high)),
}
_BINARY: dict[str, Callable[[Interval, Interval], Interval | None]] = {
    "add": Interval.plus,
    "sub": lambda x, y: Interval(x.low - y.high, x.high - y.low),
    "mul": _corners(lambda a, b: a * b),
    "div": _divide,
    "rem": _remainder,
    "min": lambda x, y: Interval(min(x.low, y.low), min(x.high, y.high)),
    "max": lambda x, y: Interval(max(x.low, y.low), max(x.high, y.high)),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_equal(y, x),
    "eq": _equal,
    "ne": _not_equal,
}


def _not(dtype: DType, x: Interval) -> Interval | None:
    # All bits flip: -1 - x of a signed dtype, top - x of an unsigned dtype, both low + high - x of the dtype.
    limits = whole(dtype)
    assert limits is not None
    return Interval(limits.low + limits.high - x.high, limits.low + limits.high - x.low)


def _and(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    if dtype == BOOL:
        return Interval(min(x.low, y.low), min(x.high, y.high))
    tops = [i.high for i in (x, y) if i.low >= 0]
    return Interval(0, min(tops)) if tops else None


def _or(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    if min(x.low, y.low) < 0:
        return None
    return Interval(max(x.low, y.low), (1 << max(x.high, y.high).bit_length()) - 1)


def _xor(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    if x.known and y.known:
        return Interval(x.low ^ y.low, x.low ^ y.low)
    return None if min(x.low, y.low) < 0 else Interval(0, (1 << max(x.high, y.high).bit_length()) - 1)


def _shift_left(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    if not (y.known and 0 <= y.low < dtype.itemsize * 8):
        return None
    return Interval(x.low << y.low, x.high << y.low)


def _shift_right(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    if not (y.known and 0 <= y.low < dtype.itemsize * 8):
        return None
    return Interval(x.low >> y.low, x.high >> y.low)


def _shift_right_logical(dtype: DType, x: Interval, y: Interval) -> Interval | None:
    return None if x.low < 0 else _shift_right(dtype, x, y)


_BITWISE: dict[str, Callable[[DType, Interval, Interval], Interval | None]] = {
    "and": _and,
    "or": _or,
    "xor": _xor,
    "shift_left": _shift_left,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right_logical,
}


# --- accesses and folds --------------------------------------------------------------------------------------------


def position_interval(position: Position, operands: Sequence[Interval | None]) -> Interval | None:
    """The interval of a position in elements, in exact arithmetic, from the intervals of the access's operands."""
    interval = Interval(position.const, position.const)
    for term in position.terms:
        digit = digit_interval(term, operands[term.operand])
        if digit is None:
            return None
        interval = interval.plus(digit.times(term.stride))
    return interval


def proved(dim: Dim, size: int, operands: Sequence[Interval | None]) -> bool:
    """True if every lane of an access lies inside of a dim of `size` elements."""
    first_element = position_interval(dim.position, operands)
    lanes = dim.size if dim.kind == "block" else 1
    return first_element is not None and first_element.within(0, size - lanes)


def proved_dims(op: MemoryOp, ranges: Mapping[Value, Interval]) -> list[bool]:
    """One flag for each dim of an access: True if every lane is proved to lie in the array."""
    operands = [ranges.get(v) for v in op.positions]
    return [proved(dim, size, operands) for dim, size in zip(op.access.dims, op.extents, strict=True)]


def digit_interval(term: Term, operand: Interval | None) -> Interval | None:
    """The interval of a digit of an operand."""
    unknown = Interval(0, term.mod - 1) if term.mod else None
    if operand is None:
        return unknown
    low, high = operand.low // term.div, operand.high // term.div
    if not term.mod:
        return Interval(low, high)
    # Within one period of the modulus the digit grows with the operand.
    return Interval(low % term.mod, high % term.mod) if low // term.mod == high // term.mod else unknown


def fold_index(op: Fold, start: Interval | None, stop: Interval | None) -> Interval:
    """The interval of a fold's index, from the intervals of its bounds; empty if no tile can run."""
    axis = op.axis
    first = 0 if start is None else axis.first_tile(start.low)
    return Interval(first, (axis.tiles if stop is None else axis.end_tile(stop.high)) - 1)


def fold_runs(op: Fold, ranges: Mapping[Value, Interval]) -> bool:
    """True if a fold surely runs at least one tile."""
    start, stop = ranges.get(op.start), ranges.get(op.stop)
    if start is None or stop is None:
        return False
    return op.axis.first_tile(start.high) < op.axis.end_tile(stop.low)


# --- a function ----------------------------------------------------------------------------------------------------


# Several passes in a row ask about one Func.
_ANALYZED: WeakKeyDictionary[Func, dict[Value, Interval]] = WeakKeyDictionary()


def analyze(func: Func) -> dict[Value, Interval]:
    """The known intervals of integer and bool values, block arguments included, in a dict of the caller's own."""
    ranges = _ANALYZED.get(func)
    if ranges is None:
        ranges = {arg: Interval(0, axis.tiles - 1) for arg, axis in zip(func.body.args, func.axes, strict=True)}
        _analyze_block(func.body, ranges)
        _ANALYZED[func] = ranges
    return dict(ranges)


def _analyze_block(block: Block, ranges: MutableMapping[Value, Interval]) -> None:
    for op in block.ops:
        if isinstance(op, Fold):
            ranges[op.body.args[0]] = fold_index(op, ranges.get(op.start), ranges.get(op.stop))
            _seed(op.inits, op.body.args[1:], op.body.results, ranges)
        elif isinstance(op, While):
            for region in op.regions:
                _seed(op.operands, region.args, op.body.results, ranges)
        for region in op.regions:
            _analyze_block(region, ranges)
        update(ranges, op)


def _seed(
    inits: Sequence[Value],
    args: Sequence[Value],
    yielded: Sequence[Value],
    ranges: MutableMapping[Value, Interval],
) -> None:
    """Add the intervals of a loop's carries in its body: unknown unless the body yields them unchanged."""
    for init, arg, result in zip(inits, args, yielded, strict=True):
        interval = ranges.get(init) if result in (arg, init) else _fallback(arg)
        if interval is not None:
            ranges[arg] = interval


def update(ranges: MutableMapping[Value, Interval], op: Op) -> None:
    """Add the intervals of an op's results, from the intervals of its operands and of the values in its regions.

    An op of the analysed Func, which a rewrite has left as it was, has its intervals.
    """
    if op.results and op.results[0] in ranges:
        return
    if not op.regions and op.pure and len(op.results) == 1:
        if whole(op.results[0].tile.dtype) is not None:  # most ops are of floats, of which nothing is known
            _set(ranges, op.result, transfer(op, [ranges.get(v) for v in op.operands]))
        return
    if isinstance(op, (Fold, While)):
        inits = op.inits if isinstance(op, Fold) else op.operands
        sources = list(zip(inits, op.regions[-1].results, strict=True))
    elif isinstance(op, Switch):
        sources = list(zip(*(region.results for region in op.regions), strict=True))
    else:
        sources = [()] * len(op.results)
    for result, values in zip(op.results, sources, strict=True):
        _set(ranges, result, _joined(values, ranges))


def _set(ranges: MutableMapping[Value, Interval], value: Value, interval: Interval | None) -> None:
    interval = _fallback(value) if interval is None else interval
    if interval is not None:
        ranges[value] = interval


def _fallback(value: Value) -> Interval | None:
    return EITHER if isinstance(value.type, TileType) and value.type.dtype == BOOL else None


def _joined(values: Sequence[Value], ranges: Mapping[Value, Interval]) -> Interval | None:
    """The hull of the intervals of the values that a result may equal."""
    intervals = [ranges.get(v) for v in values]
    return hull(*intervals) if intervals and _all_known(intervals) else None
