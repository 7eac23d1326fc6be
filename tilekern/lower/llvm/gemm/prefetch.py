"""Software prefetch of the data that the next iteration of a fold loads, a few cache lines before each microkernel.

A core has a limited number of loads in flight. If all lines were prefetched at once, they would wait for each other,
and the present iteration's loads would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Load, Term
from tilekern.ir.types import strides_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import ZERO, Coords, Index, operand_coords
from tilekern.lower.llvm.emit.digits import digit_of
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.ir_values import Reg

_LINE = 64  # bytes, on all x86-64 and most ARM
_MOST_LINES = 64  # of a row


class Prefetcher:
    """Prefetches the cache lines that a value, or one part of it, needs in the next iteration of the innermost fold.

    Loads that do not move with the fold, or that are not dense, are not prefetched.
    """

    def __init__(self, e: Elements, value: Value, part: Index, parts: int) -> None:
        self._e, self._value, self._part, self._parts = e, value, part, parts
        ops = (e.expressions.definition[v] for v in e.expressions.of(value.tile.shape, [value]).inner)
        loads = [op for op in ops if isinstance(op, Load) and _is_dense(op)]
        self._distances = {op: d for op in loads if (d := next_distance(e, op)) != ZERO}

    def prefetch_row(self, coords: Coords, width: int, dot: Dot) -> None:
        """Prefetch the data of `width` elements along the last dim, from some coordinates on.

        Of loads whose rows are rows of the value; of long rows only the first lines. A dot that shares its data with
        others prefetches the lines of its turn.
        """
        turn, turns = self._e.turns[dot]
        along = Index(coords[-1].terms, coords[-1].const, 1)
        for op, at in self._loads_of((*coords[:-1], along)):
            if op in self._distances and [i.step for i in at] == [0] * (len(at) - 1) + [1]:
                lines = range(0, width, _LINE // op.ref.ref.dtype.itemsize)[:_MOST_LINES]
                for n in lines[turn::turns]:
                    self._e.prefetch(op, (*at[:-1], at[-1].shifted(n)), self._distances[op])

    def _loads_of(self, coords: Coords) -> Iterator[tuple[Load, Coords]]:
        """The loads that an element of the value needs, each once, with the coordinates of the loaded element."""
        pending, seen = [(self._value, coords)], set[tuple[Value, Coords]]()
        while pending:
            value, at = pending.pop()
            if (value, at) in seen or self._e.expressions.is_available(value):
                continue
            seen.add((value, at))
            op = self._e.expressions.definition[value]
            if isinstance(op, Load):
                yield op, at
            else:
                pending += operand_coords(op, at, self._e.clamped_index)

    def prefetch(self, part: Index, parts: int) -> None:
        """Prefetch part number `part` of `parts` into the second-level cache."""
        for op in self._distances:
            self._prefetch(op, self._part.times(parts).plus(part), self._parts * parts)

    def _prefetch(self, op: Load, part: Index, parts: int) -> None:
        e, code, shape = self._e, self._e.code, op.result.tile.shape
        width = _LINE // op.ref.ref.dtype.itemsize
        sizes = (*shape[:-1], cdiv(shape[-1], width))
        per_part = cdiv(prod(sizes), parts)

        def line(number: Index) -> None:
            remaining, coords = e.index_value(number), list[Index]()
            for size in reversed(sizes):
                coords.insert(0, index_of(code.binary("urem", remaining, size)))
                remaining = code.binary("udiv", remaining, size)
            e.prefetch(op, (*coords[:-1], coords[-1].times(width)), self._distances[op])

        def few(first: Reg) -> None:
            with e.scope():
                for n in range(min(per_part, calibration.PREFETCHED_LINES)):
                    line(part.times(per_part).plus(index_of(first)).shifted(n))

        code.loop(0, per_part, calibration.PREFETCHED_LINES, few)


def _is_dense(op: Load) -> bool:
    """True if a load reads contiguous rows, without gathers."""
    kinds = [dim.kind for dim in op.access.dims]
    return op.result.tile.size > 0 and "gather" not in kinds and kinds[-1] == "block"


def next_distance(e: Elements, op: Load) -> Index:
    """Elements by which a load moves in one iteration of the innermost fold, as far as known; 0 if unknown.

    A position may be loaded from a table in which the fold moves, such as the next page of a cache.
    """
    distance = ZERO
    for dim, stride in zip(op.access.dims, strides_of(op.extents), strict=True):
        for term in dim.position.terms:
            step = _step_of_digit(e, term, op.positions[term.operand])
            distance = distance.plus(step.times(term.stride * stride))
    return distance


def _step_of_digit(e: Elements, term: Term, value: Value) -> Index:
    """How much larger the digit of a number will be in the next iteration; 0 if unknown."""
    step = _step(e, value)
    if term.plain or step == ZERO:
        return step

    def difference() -> Reg:
        now = e.code.cast("sext", e.registers[value], "i64")
        later = e.code.binary("add nsw", now, e.index_value(step))
        return e.code.binary("sub nsw", *(digit_of(e.code, term, x, negative=True) for x in (later, now)))

    return index_of(e.cached(("next digit", value, term.div, term.mod), difference))


def _step(e: Elements, value: Value) -> Index:
    """How much larger a number will be in the next iteration; 0 if unknown."""
    if value in e.loops:
        return Index(const=e.loops[value])
    op = e.expressions.definition.get(value)
    if not isinstance(op, Load) or op.ref.ref.role != "in" or value not in e.registers:
        return ZERO
    distance = next_distance(e, op)
    if distance == ZERO:
        return ZERO

    def difference() -> Reg:
        pair = e.load_near(op, distance), e.registers[value]
        return e.code.binary("sub nsw", *(e.code.cast("sext", x, "i64") for x in pair))

    return index_of(e.cached(("next", value), difference))
