"""Split a fold where its masks begin and cease to hold, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes; run twice, it splits the ragged parts again.

    fold k from a to c                            → fold k from a to b; fold k from b to c  b: a multiple of the block

Of the comparisons in the body, and the bounds of its accesses, some hold for all lanes of a tile from some tile on, or
up to some tile. The fold is split where the last one begins to hold and where the first one ceases to. Between these
all hold: a comparison is true there, a dim in bounds. In causal attention that are the tiles below the diagonal; then
come those on it, then the ragged one, which gets a fold of its own, too.

Let e = slope * k + s + r >= 0 say that a comparison holds, where s is a scalar from outside the fold, and r lies in
low..high over the lanes. It holds for all lanes if slope * k + s + low >= 0: with a positive slope where

    k >= ceil(-(s + low) / slope)                 = max(slope - 1 - (s + low), 0) div slope     for k >= 0

and with a negative one where

    k < floor((s + low) / -slope) + 1             = max(s + low - slope, 0) div -slope          for k >= 0

(`div` rounds toward 0.) Scalars of which nothing is known could make this, or the comparison itself, wrap around: where
one is larger than 2^28 the fold is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise

from tilekern.ir.analysis.affine import LIMIT, Affine, Lines, between
from tilekern.ir.analysis.ranges import analyze, update
from tilekern.ir.compute import splat
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import I32, INDEX


def split_loops(func: Func) -> Func:
    """Apply the rewrite above to every fold that has such masks."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold) or op.axis.tiles < 2:
            return None
        lines = Lines(op, rewriter.definition, ranges)
        proof = _Proof(op, lines)
        return _split(op, proof, lines, rewriter) if proof.lines else None

    return Rewriter(rule).run(func)


class _Proof:
    """Facts that hold in the middle part of a fold.

    Attributes:
      lines: at least 0 there, and possibly negative elsewhere; they bound the middle part.
      comparisons: the ops that are true there.
      dims: for each memory op, the numbers of the dims that are in bounds there.
    """

    def __init__(self, op: Fold, lines: Lines) -> None:
        self._lines = lines
        self.lines: list[Affine] = []
        self.comparisons: set[Op] = set()
        self.dims: dict[Op, set[int]] = {}
        for inner in op.body.ops:
            if isinstance(inner, MemoryOp):
                self.dims[inner] = {n for n in range(len(inner.access.dims)) if self._in_bounds(inner, n)}
            elif isinstance(inner, Elementwise) and inner.function in ("lt", "le", "gt", "ge"):
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
        """Add the lines that must be at least 0, if a split can make all of them so; True if it can."""
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


class _Middle(Cloner):
    """Copies the body of a fold for the part in which all that the proof says holds."""

    def __init__(self, proof: _Proof) -> None:
        super().__init__()
        self._proof = proof

    def visit(self, op: Op) -> Sequence[Value]:
        results = super().visit(self._proof.improved(op))
        for old, new in zip(op.results, results, strict=True):
            self.replace(old, new)
        return results


def _split(op: Fold, proof: _Proof, lines: Lines, rewriter: Rewriter) -> Sequence[Value]:
    """The parts one after the other; `bounds` are in elements, multiples of the block."""
    make = Make(rewriter)
    full = make.number(op.axis.full_tiles, INDEX)
    rising = [_crossing(make, line, lines, op.axis.tiles) for line in proof.lines if line.slope > 0]
    falling = [_crossing(make, line, lines, op.axis.tiles) for line in proof.lines if line.slope < 0]
    bounds: list[Value] = []
    first = make.number(0, INDEX)
    if rising:
        first = make.of("min", reduce(partial(make.of, "max"), rising), full)
        bounds.append(first)
    middle = len(bounds)
    if falling or op.axis.full_tiles < op.axis.tiles:
        bounds.append(make.of("max", reduce(partial(make.of, "min"), falling, full), first))
    if falling and op.axis.full_tiles < op.axis.tiles:
        bounds.append(full)
    block = make.number(op.axis.block, INDEX)
    elements = [make.of("mul", bound, block) for bound in bounds]
    parts = list(enumerate(pairwise([None, *elements, None])))
    carries = op.inits
    for number, (low, high) in reversed(parts) if op.reverse else parts:
        start = op.start if low is None else make.of("max", op.start, low)
        stop = op.stop if high is None else make.of("min", op.stop, high)
        cloner = _Middle(proof) if number == middle else Cloner()
        body = cloner.copy_block(op.body)
        carries = rewriter.add(op.copy((start, stop, *carries), (body,)))
    return carries


def _crossing(make: Make, line: Affine, lines: Lines, tiles: int) -> Value:
    """The tile from which on, or before which, the line is at least 0 for all lanes."""
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
