"""Loop bounds in tiles, from bounds in elements: an exact quotient where the bound is a sum of multiples of the block.

A bound of `(i * 128 + 1) // 128 * 128` elements is `i` tiles of 128. Triton does not find this. It would keep a loop of
one iteration as a loop, with all the resources of its pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.analysis.mixed_radix import Digit, Sum, Sums
from tilekern.ir.core import Value
from tilekern.ir.elementwise import Elementwise


class LoopBounds(Sums):
    """Int32 scalars as sums of numbers times values; arithmetic that may wrap around is not looked into."""

    def tiles(self, value: Value, block: int, up: bool, text: Callable[[Value], str]) -> str | None:
        """A bound in tiles as an expression, rounded down (or up); None if it takes a division."""
        parts = self.of(value).plus(Sum({}, block - 1 if up else 0)).divide(block, {})
        if parts is not None and _is_plain(parts[0]):
            return _sum(parts[0], text)
        op = self._definition(value)
        if isinstance(op, Elementwise) and op.function in ("min", "max"):
            sides = [self.tiles(v, block, up, text) for v in op.operands]
            if None not in sides:
                return f"tl.{op.function}imum({sides[0]}, {sides[1]})"
        return None

    def computed(self, value: Value) -> Sum | None:
        op = self._definition(value)
        if isinstance(op, Elementwise) and value not in self._ranges:
            return None
        if isinstance(op, Elementwise) and op.function in ("min", "max"):
            x, y = map(self.of, op.operands)
            extreme = min if op.function == "min" else max
            return extreme(x, y, key=lambda side: side.const) if x.strides == y.strides else None
        total = super().computed(value)
        if total is None or not _is_plain(total):
            return None
        return Sum({digit: stride for digit, stride in total.strides.items() if stride}, total.const)


def _is_plain(total: Sum) -> bool:
    """True if each digit of a sum is the whole of its value."""
    return all(digit == Digit(digit.value) for digit in total.strides)


def _sum(total: Sum, text: Callable[[Value], str]) -> str:
    strides = total.strides.items()
    parts = [text(d.value) if stride == 1 else f"{text(d.value)} * {stride}" for d, stride in strides]
    if total.const or not parts:
        parts.append(str(total.const))
    return " + ".join(parts).replace("+ -", "- ")
