"""Software prefetch of the data that the next iteration of a fold loads, a few cache lines before each microkernel.

A core has a limited number of loads in flight. If all lines were prefetched at once, they would wait for each other,
and the present iteration's loads would wait for them.
"""

from __future__ import annotations

from math import prod

from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Load
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.ir_values import Reg

_LINE = 64  # bytes, on all x86-64 and most ARM


class Prefetcher:
    """Prefetches the cache lines that a value, or one part of it, needs in the next iteration of the innermost fold.

    Loads that do not move with the fold, or that are not dense, are not prefetched.
    """

    def __init__(self, e: Elements, value: Value, part: Index, parts: int) -> None:
        self._e, self._part, self._parts, self._shape = e, part, parts, value.tile.shape
        ops = (e.expressions.definition[v] for v in e.expressions.of(value.tile.shape, [value]).inner)
        self._loads = [op for op in ops if isinstance(op, Load) and _is_dense(op) and e.next_distance(op)]

    def prefetch_row(self, coords: Coords, width: int) -> None:
        """Prefetch `width` elements along the last dim, from some coordinates on, of loads of the whole value."""
        for op in self._loads:
            if op.result.tile.shape == self._shape:
                for at in range(0, width, _LINE // op.ref.ref.dtype.itemsize):
                    self._e.prefetch_next(op, (*coords[:-1], coords[-1].shifted(at)))

    def prefetch(self, part: Index, parts: int) -> None:
        """Prefetch part number `part` of `parts` into the second-level cache."""
        for op in self._loads:
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
            e.prefetch_next(op, (*coords[:-1], coords[-1].times(width)))

        def few(first: Reg) -> None:
            with e.scope():
                for n in range(min(per_part, calibration.PREFETCHED_LINES)):
                    line(part.times(per_part).plus(index_of(first)).shifted(n))

        code.loop(0, per_part, calibration.PREFETCHED_LINES, few)


def _is_dense(op: Load) -> bool:
    """True if a load reads contiguous rows, without gathers."""
    kinds = [dim.kind for dim in op.access.dims]
    return op.result.tile.size > 0 and "gather" not in kinds and kinds[-1] == "block"
