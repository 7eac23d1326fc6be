"""Values in the body of a fold as straight lines in the fold's index, for `split_loops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from tilekern.ir.analysis.ranges import INT32, Interval, digit_interval
from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Position
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import INDEX

LIMIT = 1 << 28
"""Assumed bound of the magnitude of a scalar without a known interval."""


@record
class Affine:
    """`slope` * index + the sum of stride * scalar + an offset of each lane in `low`..`high`.

    A scalar that cancels out keeps the stride 0: an intermediate sum would wrap around if the scalar were large.
    """

    slope: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict[Value, int])
    low: int = 0
    high: int = 0

    @property
    def lanes(self) -> Interval:
        """The interval of the offsets of all lanes."""
        return Interval(self.low, self.high)

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """This line plus `factor` times `other`."""
        scalars = dict(self.scalars)
        for scalar, stride in other.scalars.items():
            scalars[scalar] = scalars.get(scalar, 0) + factor * stride
        lanes = self.lanes.plus(other.lanes.times(factor))
        return Affine(self.slope + factor * other.slope, scalars, lanes.low, lanes.high)


def between(low: int, high: int) -> Affine:
    """The line of a value without slope and scalars: each lane is some number in `low`..`high`."""
    return Affine(low=low, high=high)


class Lines:
    """The lines of the values of one fold's body, for values that are computed without int32 overflow.

    Scalars from outside the fold are symbols. Their magnitude is assumed to be at most `LIMIT`; see `unknown`.
    """

    def __init__(self, op: Fold, definition: Callable[[Value], Op | None], ranges: Mapping[Value, Interval]) -> None:
        self._index, self._definition, self._ranges = op.body.args[0], definition, ranges
        self._inner_values = {*op.body.args, *(v for inner in op.body.ops for v in inner.results)}
        self._lines: dict[Value, Affine | None] = {}

    def of(self, value: Value) -> Affine | None:
        """The line of an int32 value; None if none is proved."""
        if value not in self._lines:
            line = self._line(value)
            interval = self._ranges.get(value)
            if line is None or not self._interval(line).within(INT32.low, INT32.high):
                line = None if interval is None else between(interval.low, interval.high)
            self._lines[value] = line
        return self._lines[value]

    def of_position(self, position: Position, operands: Sequence[Value]) -> Affine | None:
        """The line of the first element of a dim of an access, in exact arithmetic; None if none is proved."""
        total = between(position.const, position.const)
        for term in position.terms:
            value = operands[term.operand]
            line = self.of(value) if term.plain else None
            interval = digit_interval(term, self._ranges.get(value))
            if line is None and interval is not None:
                line = between(interval.low, interval.high)
            if line is None:
                return None
            total = total.plus(line, term.stride)
        return total

    def at_least_zero(self, line: Affine) -> bool:
        """True if the intervals of the scalars prove that a line is never negative."""
        return not self.unknown(line) and self._interval(line).low >= 0

    def solvable(self, line: Affine) -> bool:
        """True if int32 arithmetic finds the tile where the line crosses 0."""
        flat = Affine(0, line.scalars, line.low, line.low)
        reach = INT32.high - abs(line.slope)
        return line.slope != 0 and self._interval(flat).within(-reach, reach)

    def unknown(self, line: Affine) -> list[Value]:
        """The scalars of a line without an interval: they must be checked against `LIMIT` at run time."""
        return [v for v in line.scalars if v not in self._ranges]

    def _interval(self, line: Affine) -> Interval:
        interval = line.lanes
        for value, stride in [(self._index, line.slope), *line.scalars.items()]:
            interval = interval.plus(self._ranges.get(value, Interval(-LIMIT, LIMIT)).times(stride))
        return interval

    def _line(self, value: Value) -> Affine | None:
        if value is self._index:
            return Affine(slope=1)
        match self._definition(value):
            case Constant(array=array) if array.size:
                return between(int(array.min()), int(array.max()))
            case Iota() as iota:
                return between(0, iota.shape[iota.dim] - 1)
            case _ if value.type == INDEX and value not in self._inner_values:
                return Affine(scalars={value: 1})
            case Broadcast(operands=(x,)) | Reshape(operands=(x,)) | Transpose(operands=(x,)):
                return self.of(x)
            case Elementwise(function="neg", operands=(x,)):
                return self._sum(between(0, 0), self.of(x), -1)
            case Elementwise(function="add", operands=(x, y)):
                return self._sum(self.of(x), self.of(y))
            case Elementwise(function="sub", operands=(x, y)):
                return self._sum(self.of(x), self.of(y), -1)
            case Elementwise(function="mul", operands=(x, y)):
                return self._product(self.of(x), self.of(y))
            case _:
                return None

    def _sum(self, x: Affine | None, y: Affine | None, factor: int = 1) -> Affine | None:
        return None if x is None or y is None else x.plus(y, factor)

    def _product(self, x: Affine | None, y: Affine | None) -> Affine | None:
        for line, factor in ((x, y), (y, x)):
            constant = factor is not None and factor == between(factor.low, factor.low)
            if line is not None and factor is not None and constant:
                return between(0, 0).plus(line, factor.low)
        return None
