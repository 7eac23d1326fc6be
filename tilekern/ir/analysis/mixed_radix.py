"""Positions as sums of strides times digits of values: their addition and division.

    s * (v % m) + (s * m) * (v // m)              = s * v
    (c * a + b) // c, (c * a + b) % c             = a, b          if 0 <= b < c
    (s * v + b) // (s * r), (s * v + b) % (s * r) = v // r, s * (v % r) + b      if 0 <= b < s

All arithmetic is exact and rounds down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.compute import Constant
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Position, Term
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast

Ranges = Mapping[Value, Interval]
Definition = Callable[[Value], Op | None]


@record
class Digit:
    """(value // div) % mod; if `mod` is 0, value // div. See `ir.memory.Term`."""

    value: Value
    div: int = 1
    mod: int = 0


@record
class Sum:
    """`const` plus the sum of `stride` times digit."""

    strides: Mapping[Digit, int]
    const: int = 0

    @property
    def vectors(self) -> list[Digit]:
        """The digits that are not scalars."""
        return [d for d in self.strides if d.value.tile.shape]

    @property
    def values(self) -> list[Value]:
        """The values that the sum depends on."""
        return list(dict.fromkeys(d.value for d in self.strides))

    def plus(self, other: Sum, factor: int = 1) -> Sum:
        """This sum plus `factor` times `other`."""
        strides = dict(self.strides)
        for digit, stride in other.strides.items():
            strides[digit] = strides.get(digit, 0) + factor * stride
        return Sum(_recombined(strides), self.const + factor * other.const)

    def position(self, operands: list[Value]) -> Position:
        """The sum as a position of an access with these operands, its terms in the order of the operands."""
        numbers = {value: number for number, value in enumerate(operands)}
        terms = [Term(numbers[d.value], stride, d.div, d.mod) for d, stride in self.strides.items()]
        return Position(tuple(sorted(terms, key=lambda t: (t.operand, -t.div, t.mod))), self.const)

    def within(self, low: int, high: int, ranges: Ranges) -> bool:
        """True if the sum is known to lie in `low`..`high`."""
        values = self.values
        interval = position_interval(self.position(values), [ranges.get(v) for v in values])
        return interval is not None and interval.within(low, high)

    def divide(self, divisor: int, ranges: Ranges) -> tuple[Sum, Sum] | None:
        """Quotient and remainder by a positive number; None if the quotient or the remainder is no such sum."""
        whole = {d: s // divisor for d, s in self.strides.items() if s % divisor == 0}
        quotient = Sum(whole, self.const // divisor)
        remainder = Sum({d: s for d, s in self.strides.items() if d not in whole}, self.const % divisor)
        if remainder.within(0, divisor - 1, ranges):
            return quotient, remainder
        lead = max(remainder.strides, key=remainder.strides.__getitem__)
        stride = remainder.strides[lead]
        low_part = Sum({d: s for d, s in remainder.strides.items() if d != lead}, remainder.const)
        if stride <= 0 or divisor % stride or not low_part.within(0, stride - 1, ranges):
            return None
        radix = divisor // stride
        if lead.mod % radix:
            return None
        high, low = Digit(lead.value, lead.div * radix, lead.mod // radix), Digit(lead.value, lead.div, radix)
        return quotient.plus(Sum({high: 1})), low_part.plus(Sum({low: stride}))


def leaf(value: Value) -> Sum:
    """A value as a sum with a single digit: the value itself."""
    return Sum({Digit(value): 1})


def _recombined(strides: Mapping[Digit, int]) -> Mapping[Digit, int]:
    """`s * (v // d % m) + s * m * (v // (d * m) % n)` → `s * (v // d % (m * n))`, wherever it applies."""
    for low, stride in strides.items():
        for high in strides:
            fits = low.value is high.value and low.mod > 1 and low.div * low.mod == high.div
            if fits and stride and strides[high] == stride * low.mod:
                unchanged = {d: s for d, s in strides.items() if d not in (low, high)}
                combined = Digit(low.value, low.div, low.mod * high.mod)
                return _recombined({**unchanged, combined: unchanged.get(combined, 0) + stride})
    return strides


class Sums:
    """Int32 values as sums, as far as arithmetic defines them.

    Args:
      definition: maps a value to the op that computes it, an argument to None.
      ranges: the intervals of values. Only a value with an interval is divided: the arithmetic that leads to it does
        not wrap around.
    """

    def __init__(self, definition: Definition, ranges: Ranges) -> None:
        self._definition, self._ranges = definition, ranges
        self._sums: dict[Value, Sum] = {}

    def of(self, value: Value) -> Sum:
        """A value as a sum with at most one vector, else the value itself as the only digit."""
        if value not in self._sums:
            total = self.computed(value)
            self._sums[value] = total if total is not None and len(total.vectors) <= 1 else leaf(value)
        return self._sums[value]

    def computed(self, value: Value) -> Sum | None:
        """The sum that the op of a value computes; None if it computes none."""
        match self._definition(value):
            case Constant(array=array) if array.shape == ():
                return Sum({}, int(array))
            case Broadcast(operands=(x,)) if x.tile.shape == ():
                return self.of(x)
            case Elementwise(function="neg", operands=(x,)):
                return Sum({}).plus(self.of(x), -1)
            case Elementwise(function="add", operands=(x, y)):
                return self.of(x).plus(self.of(y))
            case Elementwise(function="sub", operands=(x, y)):
                return self.of(x).plus(self.of(y), -1)
            case Elementwise(function="mul", operands=(x, y)):
                sums = self.of(x), self.of(y)
                factors = [(a, b.const) for a, b in (sums, sums[::-1]) if not b.strides]
                return Sum({}).plus(*factors[0]) if factors else None
            case Elementwise(function="div" | "rem" as function, operands=(x, y)):
                return self._divided(function, x, self.of(y))
            case _:
                return None

    def _divided(self, function: str, x: Value, divisor: Sum) -> Sum | None:
        """`x div c` or `x rem c` as a sum; None unless x >= 0 and c is a constant > 0, for then both round down."""
        interval = self._ranges.get(x)
        if divisor.strides or divisor.const <= 0 or interval is None or interval.low < 0:
            return None
        parts = self.of(x).divide(divisor.const, self._ranges)
        quotient, remainder = parts or (Sum({Digit(x, divisor.const): 1}), Sum({Digit(x, 1, divisor.const): 1}))
        return quotient if function == "div" else remainder
