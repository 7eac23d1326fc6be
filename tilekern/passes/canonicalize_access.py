"""Take the arithmetic that computes a position into the access itself.

Every backend reads `Access` and nothing else, so what is affine has to stand there. Part of `canonicalize`.

    p = 4 * i - j + 3;  load x[p]                 → load x[4 * i - j + 3]
    v = w + broadcast(i);  load x[gather v]       → load x[gather w + i]
    load x[gather iota + i]                       → load x[i : i + size]

Terms of one operand are added up, terms of stride 0 go, and the operands are numbered anew: the grid's indices in the
grid's order, then the others in order of appearance. A position is exact where int32 arithmetic wraps around: an index
that overflows int32 is out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilekern.ir.core import Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, MemoryOp, Position, Term
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Iota
from tilekern.passes.constants import integer_of


@dataclass(frozen=True)
class _Sum:
    """`const` plus the sum of `stride` times value; at most one value is a vector."""

    strides: dict[Value, int]
    const: int = 0

    def plus(self, other: _Sum, factor: int = 1) -> _Sum:
        """This and `factor` times the other."""
        strides = dict(self.strides)
        for value, stride in other.strides.items():
            strides[value] = strides.get(value, 0) + factor * stride
        return _Sum(strides, self.const + factor * other.const)

    @property
    def vectors(self) -> list[Value]:
        """The operands that are not scalars."""
        return [v for v in self.strides if v.tile.shape]


class Absorber:
    """The rule for one Func, whose body's arguments are `indices`; it remembers the sums that it has taken apart."""

    def __init__(self, indices: Sequence[Value]) -> None:
        self._indices = indices
        self._sums: dict[Value, _Sum] = {}

    def rule(self, op: MemoryOp, rewriter: Rewriter) -> Sequence[Value] | None:
        """Replace a load or store by one whose access has taken in the arithmetic."""
        found = [self._dim(dim, op.positions, rewriter) for dim in op.access.dims]
        used = {value: None for _, total in found for value in total.strides}
        order = [v for v in self._indices if v in used]
        order += [v for v in used if v not in order]
        access = Access(tuple(replace(dim, position=_position(total, order)) for dim, total in found))
        before, after = op.operands[: op.leading], op.operands[op.leading + op.access.arity :]
        operands = (*before, *order, *after)
        if (access, operands) == (op.access, op.operands):
            return None
        return rewriter.add(replace(op, access=access, operands=operands))

    def _dim(self, dim: Dim, positions: Sequence[Value], rewriter: Rewriter) -> tuple[Dim, _Sum]:
        """A dim of the new access, and its position."""
        total = _Sum({}, dim.position.const)
        for term in dim.position.terms:
            value = positions[term.operand]
            found = self._sum(value, rewriter)
            # A gather needs a vector, even one whose lanes are all equal.
            total = total.plus(found if value.tile.shape == () or found.vectors else _Sum({value: 1}), term.stride)
        total = _Sum({v: s for v, s in total.strides.items() if s or v.tile.shape}, total.const)
        for vector in total.vectors:
            if total.strides[vector] == 1 and isinstance(rewriter.definition(vector), Iota):
                rest = {v: s for v, s in total.strides.items() if v is not vector}
                return replace(dim, kind="block"), _Sum(rest, total.const)
        return dim, total

    def _sum(self, value: Value, rewriter: Rewriter) -> _Sum:
        """A value as a sum, as far as its definition is one; of a vector's lanes, equal parts count as scalars."""
        if value not in self._sums:
            found = self._definition(value, rewriter)
            self._sums[value] = found if found is not None and len(found.vectors) <= 1 else _Sum({value: 1})
        return self._sums[value]

    def _definition(self, value: Value, rewriter: Rewriter) -> _Sum | None:
        number = integer_of(value, rewriter)
        if number is not None:
            return _Sum({}, number)
        match rewriter.definition(value):
            case Broadcast(operands=(x,)) if x.tile.shape == ():
                return self._sum(x, rewriter)
            case Elementwise(function="neg", operands=(x,)):
                return _Sum({}).plus(self._sum(x, rewriter), -1)
            case Elementwise(function="add", operands=(x, y)):
                return self._sum(x, rewriter).plus(self._sum(y, rewriter))
            case Elementwise(function="sub", operands=(x, y)):
                return self._sum(x, rewriter).plus(self._sum(y, rewriter), -1)
            case Elementwise(function="mul", operands=(x, y)):
                sums = self._sum(x, rewriter), self._sum(y, rewriter)
                factors = [(a, b.const) for a, b in (sums, sums[::-1]) if not b.strides]
                return _Sum({}).plus(*factors[0]) if factors else None
            case _:
                return None


def _position(total: _Sum, order: Sequence[Value]) -> Position:
    terms = (Term(number, total.strides[value]) for number, value in enumerate(order) if value in total.strides)
    return Position(tuple(terms), total.const)
