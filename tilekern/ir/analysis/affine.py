"""Values in the body of a fold as straight lines in the fold's index, for `split_loops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilekern.ir.analysis.ranges import INT32, Interval, digit_interval
from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Position
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import INDEX

LIMIT = 1 << 28
"""Assumed bound of the magnitude of a scalar without a known interval."""


@dataclass(frozen=True)
class Affine:
    """`slope` times the index, plus a sum of strides times scalars, plus an offset of each lane in `low`..`high`.

    A scalar that cancels out keeps the stride 0: an intermediate sum would wrap around if the scalar were large.
    """

    slope: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict[Value, int])
    low: int = 0
    high: int = 0

    @property
    def lanes(self) -> Interval:
        """The interval of the offsets of lanes."""
        return Interval(self.low, self.high)

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """This and `factor` times the other."""
        scalars = dict(self.scalars)
        for scalar, stride in other.scalars.items():
            scalars[scalar] = scalars.get(scalar, 0) + factor * stride
        lanes = self.lanes.plus(other.lanes.times(factor))
        return Affine(self.slope + factor * other.slope, scalars, lanes.low, lanes.high)


def between(low: int, high: int) -> Affine:
    """An unknown number in `low`..`high`, for each lane."""
    return Affine(low=low, high=high)


class Lines:
    """The values of one fold's body that are lines, computed without int32 overflow.

    Scalars from outside the fold are symbols. Their magnitude is assumed to be at most `LIMIT`; see `unknown`.
    """

    def __init__(self, op: Fold, definition: Callable[[Value], Op | None], ranges: Mapping[Value, Interval]) -> None:
        self._index, self._definition, self._ranges = op.body.args[0], definition, ranges
        self._inside = {*op.body.args, *(v for inner in op.body.ops for v in inner.results)}
        self._found: dict[Value, Affine | None] = {}

    def of(self, value: Value) -> Affine | None:
        """An int32 value as a line, None if it is not known to be one."""
        if value not in self._found:
            line = self._line(value)
            known = self._ranges.get(value)
            if line is None or not self._interval(line).within(INT32.low, INT32.high):
                line = None if known is None else between(known.low, known.high)
            self._found[value] = line
        return self._found[value]

    def of_position(self, position: Position, operands: Sequence[Value]) -> Affine | None:
        """The first element of a dim of an access as a line; exact."""
        total = between(position.const, position.const)
        for term in position.terms:
            value = operands[term.operand]
            line = self.of(value) if term.plain else None
            known = digit_interval(term, self._ranges.get(value))
            if line is None and known is not None:
                line = between(known.low, known.high)
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
        """The scalars of a line that must be checked against `LIMIT` at run time."""
        return [v for v in line.scalars if v not in self._ranges]

    def _interval(self, line: Affine) -> Interval:
        found = line.lanes
        for value, stride in [(self._index, line.slope), *line.scalars.items()]:
            found = found.plus(self._ranges.get(value, Interval(-LIMIT, LIMIT)).times(stride))
        return found

    def _line(self, value: Value) -> Affine | None:
        if value is self._index:
            return Affine(slope=1)
        match self._definition(value):
            case Constant(array=array) if array.size:
                return between(int(array.min()), int(array.max()))
            case Iota() as iota:
                return between(0, iota.shape[iota.dim] - 1)
            case _ if value.type == INDEX and value not in self._inside:
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
