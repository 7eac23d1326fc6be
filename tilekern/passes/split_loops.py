"""Split a fold where its masks begin and cease to hold, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes; run twice, it splits the ragged parts again.

    fold k from a to c                            → fold k from a to b; fold k from b to c      b: a multiple of the block

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

from tilekern.ir.compute import splat
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, MemoryOp
from tilekern.ir.ranges import analyze, update
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import I32
from tilekern.passes.affine import Affine, Lines


def split_loops(func: Func) -> Func:
    """Apply the rewrite above to every fold that has such masks."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold) or op.axis.tiles < 2:
            return None
        proof = _Proof(op, Lines(op, rewriter.definition, ranges))
        return _split(op, proof, rewriter) if proof.lines else None

    return Rewriter(rule).run(func)


class _Proof:
    """What holds in the middle part of a fold.

    Attributes:
      lines: what is at least 0 there and not known to be so elsewhere.
      comparisons: they are true there.
      dims: the numbers of the dims of a memory op that are in bounds there.
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
            least = greater.plus(less, -1).shifted(-1 if op.function in ("lt", "gt") else 0)
            if self._take([least]):
                self.comparisons.add(op)

    def _in_bounds(self, op: MemoryOp, number: int) -> bool:
        """Whether a dim is in bounds in the middle part, by a split that concerns it."""
        dim, size = op.access.dims[number], op.ref.ref.shape[number]
        position = None if dim.in_bounds else self._lines.of_position(dim.position, op.positions)
        if position is None:
            return False
        lanes = dim.size if dim.kind == "block" else 1
        return self._take([position, Affine(0, {}, size - lanes, size - lanes).plus(position, -1)])

    def _take(self, least: Sequence[Affine]) -> bool:
        """Note what must be at least 0 for something to hold, if a split can bring it about."""
        unknown = [line for line in least if not self._lines.at_least_zero(line)]
        if not unknown or not all(line.slope and self._lines.solvable(line) for line in unknown):
            return False
        self.lines += [line for line in unknown if line not in self.lines]
        return True

    def clone(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        """The rule that makes a copy of the body for the middle part."""
        if op in self.comparisons:
            return [rewriter.one(splat(True, op.result.tile, loc=op.loc))]
        if isinstance(op, MemoryOp) and self.dims.get(op):
            dims = (replace(d, in_bounds=d.in_bounds or n in self.dims[op]) for n, d in enumerate(op.access.dims))
            return rewriter.add(replace(op, access=Access(tuple(dims))))
        return None
