"""Take the arithmetic that computes a position into the access itself.

Backends read positions in `Access` alone, so sums of strides times digits must stand there. Part of `canonicalize`.

    p = 4 * i - j + 3;  load x[p]                 → load x[4 * i - j + 3]
    v = w + broadcast(i);  load x[gather v]       → load x[gather w + i]
    load x[gather iota + i]                       → load x[i : i + size]
    p = n div 4, r = n rem 4;  load x[p, r]       → load x[n // 4, n % 4], where n >= 0
    p = (n div 4) * 4 + n rem 4;  load x[p]       → load x[n], where n >= 0

Terms of one digit are added up, terms of stride 0 go, and the operands are numbered anew: the grid's indices in the
grid's order, then all others in order of appearance. A position is exact where int32 arithmetic wraps around: an index
that overflows int32 is out of bounds. Only values that are proved not to wrap are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.analysis.mixed_radix import Definition, Digit, Ranges, Sum, Sums, leaf
from tilekern.ir.core import Value
from tilekern.ir.memory import Dim, MemoryOp, Term
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota


class Absorber:
    """The rule for one Func, whose body's arguments are `indices`."""

    def __init__(self, indices: Sequence[Value], definition: Definition, ranges: Ranges) -> None:
        self._indices, self._definition, self._ranges = indices, definition, ranges
        self._sums = Sums(definition, ranges)

    def rule(self, op: MemoryOp, rewriter: Rewriter) -> Sequence[Value] | None:
        """Replace a load or store by a copy whose access has taken in the arithmetic."""
        together = {lane for dim, lane in zip(op.access.dims, op.access.lanes, strict=True) if dim.kind == "along"}
        places = zip(op.access.dims, op.access.lanes, strict=True)
        absorbed = [self._dim(dim, op.positions, lane in together) for dim, lane in places]
        used = {value: None for _, total in absorbed for value in total.values}
        order = [v for v in self._indices if v in used]
        order += [v for v in used if v not in order]
        access = replace(op.access, dims=tuple(replace(d, position=total.position(order)) for d, total in absorbed))
        before, after = op.operands[: op.leading], op.operands[op.leading + op.access.arity :]
        operands = (*before, *order, *after)
        if (access, operands) == (op.access, op.operands):
            return None
        return rewriter.add(replace(op, access=access, operands=operands))

    def _dim(self, dim: Dim, positions: Sequence[Value], together: bool) -> tuple[Dim, Sum]:
        """A dim of the new access, and its position; a gather with `along` dims (`together`) stays a gather."""
        total = Sum({}, dim.position.const)
        for term in dim.position.terms:
            value = positions[term.operand]
            digit = self._digit(value, term)
            # A gather needs a vector, even one whose lanes are all equal.
            if value.tile.shape and not digit.vectors:
                digit = Sum({Digit(value, term.div, term.mod): 1})
            total = total.plus(digit, term.stride)
        total = Sum({d: s for d, s in total.strides.items() if s or d.value.tile.shape}, total.const)
        for vector in total.vectors:
            is_iota = vector == Digit(vector.value) and isinstance(self._definition(vector.value), Iota)
            if is_iota and total.strides[vector] == 1 and not together:
                strides = {d: s for d, s in total.strides.items() if d != vector}
                return replace(dim, kind="block"), Sum(strides, total.const)
        return dim, total

    def _digit(self, value: Value, term: Term) -> Sum:
        """The digit of a value that a term takes, as a sum."""
        whole, plain = self._sums.of(value), Sum({Digit(value, term.div, term.mod): 1})
        if term.plain:
            return whole
        if whole != leaf(value) and value not in self._ranges:
            return plain
        halves = whole.divide(term.div, self._ranges)
        if halves is None or not term.mod:
            return halves[0] if halves else plain
        parts = halves[0].divide(term.mod, self._ranges)
        return parts[1] if parts else plain
