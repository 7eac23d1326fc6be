"""Fetching what the next iteration of a fold will load, a few lines at a time while this one multiplies.

All of them at once would wait for each other, and for what is loaded meanwhile: a core has only so many on the way.
"""

from __future__ import annotations

from math import prod

from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Load
from tilekern.lower.llvm.element_index import Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.ir_builder import Reg

_LINE = 64  # bytes, on all x86-64 and most ARM
_FEW = 8  # lines that are fetched without a loop around


class Prefetcher:
    """The lines of memory that a value comes from in the next iteration of the innermost fold, or one part of them.

    There are none of loads that do not move with the fold, or whose neighbours are no neighbours in memory.
    """

    def __init__(self, e: Elements, value: Value, part: Index, parts: int) -> None:
        self._e, self._part, self._parts = e, part, parts
        ops = (e.expressions.definition[v] for v in e.expressions.of(value.tile.shape, [value]).inner)
        self._loads = [op for op in ops if isinstance(op, Load) and _is_dense(op) and e.next_distance(op)]

    def prefetch(self, part: Index, parts: int) -> None:
        """Fetch one of so many smaller parts into the second-level cache."""
        for op in self._loads:
            self._prefetch(op, self._part.times(parts).plus(part), self._parts * parts)

    def _prefetch(self, op: Load, part: Index, parts: int) -> None:
        e, code, shape = self._e, self._e.code, op.result.tile.shape
        width = _LINE // op.ref.ref.dtype.itemsize
        sizes = (*shape[:-1], cdiv(shape[-1], width))
        each = cdiv(prod(sizes), parts)

        def line(number: Index) -> None:
            rest, coords = e.index_value(number), list[Index]()
            for size in reversed(sizes):
                coords.insert(0, index_of(code.binary("urem", rest, size)))
                rest = code.binary("udiv", rest, size)
            e.prefetch_next(op, (*coords[:-1], coords[-1].times(width)))

        def few(first: Reg) -> None:
            with e.scope():
                for n in range(min(each, _FEW)):
                    line(part.times(each).plus(index_of(first)).shifted(n))

        code.loop(0, each, _FEW, few)


def _is_dense(op: Load) -> bool:
    """Whether a load is of rows of neighbours, at places that the loops around know."""
    kinds = [dim.kind for dim in op.access.dims]
    return op.result.tile.size > 0 and "gather" not in kinds and kinds[-1] == "block"
