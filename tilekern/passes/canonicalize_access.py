"""Take the arithmetic that computes a position into the access itself.

Every backend reads `Access` and nothing else, so what is affine in digits has to stand there. Part of `canonicalize`.

    p = 4 * i - j + 3;  load x[p]                 → load x[4 * i - j + 3]
    v = w + broadcast(i);  load x[gather v]       → load x[gather w + i]
    load x[gather iota + i]                       → load x[i : i + size]
    p = n div 4, r = n rem 4;  load x[p, r]       → load x[n // 4, n % 4], where n >= 0
    p = (n div 4) * 4 + n rem 4;  load x[p]       → load x[n], where n >= 0

Terms of one digit are added up, terms of stride 0 go, and the operands are numbered anew: the grid's indices in the
grid's order, then the others in order of appearance. A position is exact where int32 arithmetic wraps around: an index
that overflows int32 is out of bounds. What is divided is known not to wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.analysis.constants import integer_of
from tilekern.ir.analysis.mixed_radix import Digit, Ranges, Sum, leaf
from tilekern.ir.core import Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Dim, MemoryOp, Term
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Iota


class Absorber:
    """The rule for one Func, whose body's arguments are `indices`; it remembers the sums that it has taken apart."""

    def __init__(self, indices: Sequence[Value], ranges: Ranges) -> None:
        self._indices, self._ranges = indices, ranges
        self._sums: dict[Value, Sum] = {}

    def rule(self, op: MemoryOp, rewriter: Rewriter) -> Sequence[Value] | None:
        """Replace a load or store by one whose access has taken in the arithmetic."""
        together = {lane for dim, lane in zip(op.access.dims, op.access.lanes, strict=True) if dim.kind == "along"}
        places = zip(op.access.dims, op.access.lanes, strict=True)
        found = [self._dim(dim, op.positions, rewriter, lane in together) for dim, lane in places]
        used = {value: None for _, total in found for value in total.values}
        order = [v for v in self._indices if v in used]
        order += [v for v in used if v not in order]
        access = replace(op.access, dims=tuple(replace(d, position=total.position(order)) for d, total in found))
        before, after = op.operands[: op.leading], op.operands[op.leading + op.access.arity :]
        operands = (*before, *order, *after)
        if (access, operands) == (op.access, op.operands):
            return None
        return rewriter.add(replace(op, access=access, operands=operands))

    def _dim(self, dim: Dim, positions: Sequence[Value], rewriter: Rewriter, together: bool) -> tuple[Dim, Sum]:
        """A dim of the new access, and its position; one of several that go together stays a gather."""
        total = Sum({}, dim.position.const)
        for term in dim.position.terms:
            value = positions[term.operand]
            found = self._digit(value, term, rewriter)
            # A gather needs a vector, even one whose lanes are all equal.
            if value.tile.shape and not found.vectors:
                found = Sum({Digit(value, term.div, term.mod): 1})
            total = total.plus(found, term.stride)
        total = Sum({d: s for d, s in total.strides.items() if s or d.value.tile.shape}, total.const)
        for vector in total.vectors:
            is_iota = vector == Digit(vector.value) and isinstance(rewriter.definition(vector.value), Iota)
            if is_iota and total.strides[vector] == 1 and not together:
                rest = {d: s for d, s in total.strides.items() if d != vector}
                return replace(dim, kind="block"), Sum(rest, total.const)
        return dim, total

    def _digit(self, value: Value, term: Term, rewriter: Rewriter) -> Sum:
        """The digit that a term takes of a value, as a sum."""
        whole, plain = self._sum(value, rewriter), Sum({Digit(value, term.div, term.mod): 1})
        if term.plain:
            return whole
        if whole != leaf(value) and value not in self._ranges:
            return plain
        halves = whole.divide(term.div, self._ranges)
        if halves is None or not term.mod:
            return halves[0] if halves else plain
        parts = halves[0].divide(term.mod, self._ranges)
        return parts[1] if parts else plain

    def _sum(self, value: Value, rewriter: Rewriter) -> Sum:
        """A value as a sum, as far as its definition is one; of a vector's lanes, equal parts count as scalars."""
        if value not in self._sums:
            found = self._definition(value, rewriter)
            self._sums[value] = found if found is not None and len(found.vectors) <= 1 else leaf(value)
        return self._sums[value]

    def _definition(self, value: Value, rewriter: Rewriter) -> Sum | None:
        number = integer_of(value, rewriter)
        if number is not None:
            return Sum({}, number)
        match rewriter.definition(value):
            case Broadcast(operands=(x,)) if x.tile.shape == ():
                return self._sum(x, rewriter)
            case Elementwise(function="neg", operands=(x,)):
                return Sum({}).plus(self._sum(x, rewriter), -1)
            case Elementwise(function="add", operands=(x, y)):
                return self._sum(x, rewriter).plus(self._sum(y, rewriter))
            case Elementwise(function="sub", operands=(x, y)):
                return self._sum(x, rewriter).plus(self._sum(y, rewriter), -1)
            case Elementwise(function="mul", operands=(x, y)):
                sums = self._sum(x, rewriter), self._sum(y, rewriter)
                factors = [(a, b.const) for a, b in (sums, sums[::-1]) if not b.strides]
                return Sum({}).plus(*factors[0]) if factors else None
            case Elementwise(function="div" | "rem" as function, operands=(x, y)):
                return self._divided(function, x, integer_of(y, rewriter), rewriter)
            case _:
                return None

    def _divided(self, function: str, x: Value, divisor: int | None, rewriter: Rewriter) -> Sum | None:
        """`x div c` or `x rem c`, which round down where x >= 0 and c > 0."""
        known = self._ranges.get(x)
        if divisor is None or divisor <= 0 or known is None or known.low < 0:
            return None
        # A known interval says that nothing on the way to x wraps around, so that the sum is exact.
        parts = self._sum(x, rewriter).divide(divisor, self._ranges)
        quotient, remainder = parts or (Sum({Digit(x, divisor): 1}), Sum({Digit(x, 1, divisor): 1}))
        return quotient if function == "div" else remainder
