"""Bounds of loops in tiles, from bounds in elements: divided by the block where it can be seen that they are multiples.

`(i * 128 + 1) // 128 * 128` elements are `i` tiles of 128. Triton would not find that, and would keep a loop of one
iteration as a loop, with all that its pipeline takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Constant
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import INDEX


@dataclass(frozen=True)
class Affine:
    """A sum of numbers times values, plus a number."""

    terms: Mapping[Value, int] = field(default_factory=dict[Value, int])
    const: int = 0

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """This and `factor` times the other."""
        terms = dict(self.terms)
        for value, stride in other.terms.items():
            terms[value] = terms.get(value, 0) + factor * stride
        return Affine({v: n for v, n in terms.items() if n}, self.const + factor * other.const)

    def quotient(self, by: int, up: bool = False) -> Affine | None:
        """Divided by a positive number, rounded down (or up), if only the number that is added needs rounding."""
        if any(stride % by for stride in self.terms.values()):
            return None
        const = -(-self.const // by) if up else self.const // by
        return Affine({v: n // by for v, n in self.terms.items()}, const)


class LoopBounds:
    """What is known of int32 scalars.

    Args:
      definitions: the op that makes a value.
      ranges: where values lie; arithmetic that may wrap around has no interval, and is not looked into.
    """

    def __init__(self, definitions: Mapping[Value, Op], ranges: Mapping[Value, Interval]) -> None:
        self._definitions, self._ranges = definitions, ranges

    def tiles(self, value: Value, block: int, up: bool, text: Callable[[Value], str]) -> str | None:
        """A bound in tiles as an expression, rounded down (or up); None if it takes a division."""
        found = self._affine(value).quotient(block, up)
        if found is not None:
            return _sum(found, text)
        op = self._definitions.get(value)
        if isinstance(op, Elementwise) and op.function in ("min", "max"):
            sides = [self.tiles(v, block, up, text) for v in op.operands]
            if None not in sides:
                return f"tl.{op.function}imum({sides[0]}, {sides[1]})"
        return None

    def _affine(self, value: Value) -> Affine:
        op = self._definitions.get(value)
        if isinstance(op, Constant) and value.type == INDEX:
            return Affine(const=int(op.array))
        leaf = Affine({value: 1})
        if not isinstance(op, Elementwise) or value.type != INDEX or value not in self._ranges:
            return leaf
        if len(op.operands) != 2:
            return leaf
        x, y = op.operands
        return self._of(op.function, self._affine(x), self._affine(y), self._ranges.get(x)) or leaf

    def _of(self, function: str, x: Affine, y: Affine, interval: Interval | None) -> Affine | None:
        match function:
            case "add":
                return x.plus(y)
            case "sub":
                return x.plus(y, -1)
            case "mul" if not y.terms:
                return Affine().plus(x, y.const)
            case "mul" if not x.terms:
                return Affine().plus(y, x.const)
            case "div" if not y.terms and y.const > 0 and interval is not None and interval.low >= 0:
                return x.quotient(y.const)
            case "min" | "max" if x.terms == y.terms:
                return min(x, y, key=lambda a: a.const if function == "min" else -a.const)
            case _:
                return None


def _sum(affine: Affine, text: Callable[[Value], str]) -> str:
    parts = [text(v) if stride == 1 else f"{text(v)} * {stride}" for v, stride in affine.terms.items()]
    if affine.const or not parts:
        parts.append(str(affine.const))
    return " + ".join(parts).replace("+ -", "- ")
