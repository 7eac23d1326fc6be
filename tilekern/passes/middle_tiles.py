"""The middle tiles of a fold, in which its masks hold for all lanes: their bounds, and the facts that hold there.

Let e = slope * k + s + r >= 0 say that a comparison holds, where s is a scalar from outside the fold, and r lies in
low..high over the lanes. It holds for all lanes if slope * k + s + low >= 0: with a positive slope where

    k >= ceil(-(s + low) / slope)                 = max(slope - 1 - (s + low), 0) div slope     for k >= 0

and with a negative slope where

    k < floor((s + low) / -slope) + 1             = max(s + low - slope, 0) div -slope          for k >= 0

(`div` rounds toward 0.) Scalars without a known interval could make this, or the comparison itself, wrap around: if a
scalar is larger than 2^28, no tile counts as a middle tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.analysis.affine import LIMIT, Affine, Lines, between
from tilekern.ir.compute import splat
from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Cloner
from tilekern.ir.types import I32, INDEX


class Proof:
    """Facts that hold in the middle part of a fold.

    Attributes:
      lines: lines that are at least 0 in the middle part, and possibly negative elsewhere; they bound the middle part.
      comparisons: the comparisons that are true in the middle part.
      dims: for each memory op, the numbers of the dims that are in bounds there; empty without `accesses`.
    """

    def __init__(self, op: Fold, lines: Lines, accesses: bool = True) -> None:
        self._lines = lines
        self.lines: list[Affine] = []
        self.comparisons: set[Op] = set()
        self.dims: dict[Op, set[int]] = {}
        for inner in op.body.ops:
            if isinstance(inner, MemoryOp) and accesses:
                self.dims[inner] = {n for n in range(len(inner.access.dims)) if self._in_bounds(inner, n)}
            if isinstance(inner, Elementwise) and inner.function in ("lt", "le", "gt", "ge"):
                self._compare(inner)

    def _compare(self, op: Elementwise) -> None:
        x, y = op.operands if op.function in ("gt", "ge") else op.operands[::-1]
        if x.tile.dtype != I32:
            return
        greater, less = self._lines.of(x), self._lines.of(y)
        if greater is not None and less is not None:
            strict = int(op.function in ("lt", "gt"))
            if self._take([greater.plus(less, -1).plus(between(strict, strict), -1)]):
                self.comparisons.add(op)

    def _in_bounds(self, op: MemoryOp, number: int) -> bool:
        """True if a split proves that a dim is in bounds in the middle part."""
        dim, size = op.access.dims[number], op.extents[number]
        position = None if dim.in_bounds else self._lines.of_position(dim.position, op.positions)
        if position is None:
            return False
        lanes = dim.size if dim.kind == "block" else 1
        return self._take([position, between(size - lanes, size - lanes).plus(position, -1)])

    def _take(self, least: Sequence[Affine]) -> bool:
        """Add the lines that must be at least 0, and return True, if a split can make all of `least` at least 0."""
        unknown = [line for line in least if not self._lines.at_least_zero(line)]
        if not unknown or not all(line.slope and self._lines.solvable(line) for line in unknown):
            return False
        self.lines += [line for line in unknown if line not in self.lines]
        return True

    def improved(self, op: Op) -> Op:
        """An op of the body as it stands in the middle part."""
        if op in self.comparisons:
            return splat(True, op.result.tile, loc=op.loc)
        if not isinstance(op, MemoryOp) or not self.dims.get(op):
            return op
        marks = (dim.in_bounds or n in self.dims[op] for n, dim in enumerate(op.access.dims))
        return replace(op, access=op.access.marked(marks))


class Middle(Cloner):
    """Copies the body of a fold for the part in which the facts of the proof hold."""

    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self._proof = proof

    def visit(self, op: Op) -> Sequence[Value]:
        results = super().visit(self._proof.improved(op))
        for old, new in zip(op.results, results, strict=True):
            self.replace(old, new)
        return results


def crossing(make: Make, line: Affine, lines: Lines, tiles: int) -> Value:
    """The tile from which on (slope > 0), or before which (slope < 0), the line is at least 0 for all lanes."""
    rises = line.slope > 0
    total = make.number(line.slope - 1 - line.low if rises else line.low - line.slope, INDEX)
    for scalar, stride in line.scalars.items():
        total = make.of("add", total, make.of("mul", scalar, -stride if rises else stride))
    tile = make.of("div", make.of("max", total, 0), abs(line.slope))
    never = make.number(tiles if rises else 0, INDEX)
    for scalar in lines.unknown(line):
        inside = make.of("and", make.of("ge", scalar, -LIMIT), make.of("le", scalar, LIMIT))
        tile = make.select(inside, tile, never)
    return tile
