"""Proofs of x <= y between int32 scalars, from their ranges and from minima, maxima and products."""

from __future__ import annotations

from tilekern.ir.analysis.ranges import INT32, analyze
from tilekern.ir.core import Func, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.lower.mosaic.calibration import MAX_PROOF_DEPTH


class Inequalities:
    """Provable inequalities between the int32 scalars of a Func."""

    def __init__(self, func: Func) -> None:
        self._definitions, self._ranges = definitions(func), analyze(func)

    def at_most(self, x: Value, y: Value, depth: int = MAX_PROOF_DEPTH) -> bool:
        """True if x <= y can be proved; False says nothing."""
        if x is y:
            return True
        least, most = self._ranges.get(x), self._ranges.get(y)
        if least is not None and most is not None and least.high <= most.low:
            return True
        if depth == 0:
            return False
        below = [self.at_most(v, y, depth - 1) for v in self._operands(x, "min")]
        above = [self.at_most(x, v, depth - 1) for v in self._operands(y, "max")]
        if any(below) or any(above):
            return True
        every_below = [self.at_most(v, y, depth - 1) for v in self._operands(x, "max")]
        every_above = [self.at_most(x, v, depth - 1) for v in self._operands(y, "min")]
        return all(every_below or [False]) or all(every_above or [False]) or self._multiples(x, y, depth)

    def _operands(self, value: Value, function: str) -> tuple[Value, ...]:
        op = self._definitions.get(value)
        return op.operands if isinstance(op, Elementwise) and op.function == function else ()

    def _multiples(self, x: Value, y: Value, depth: int) -> bool:
        """True if x = a * c and y = b * c for a constant c > 0, neither product wraps around, and a <= b."""
        x_product, y_product = self._factor(x), self._factor(y)
        if x_product is None or y_product is None or x_product[1] != y_product[1]:
            return False
        return self.at_most(x_product[0], y_product[0], depth - 1)

    def _factor(self, value: Value) -> tuple[Value, int] | None:
        """(number, factor) of a product with a constant factor > 0 that does not wrap around; else None."""
        operands = self._operands(value, "mul")
        for number, factor in (operands, operands[::-1]) if operands else ():
            times, interval = self._ranges.get(factor), self._ranges.get(number)
            if times is not None and times.known and times.low > 0 and interval is not None:
                product = interval.times(times.low)
                return (number, times.low) if product.within(INT32.low, INT32.high) else None
        return None
