"""Split a fold where its masks begin and cease to hold, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes; run twice, it splits the ragged parts again.

    fold k from a to c                            → fold k from a to b; fold k from b to c  b: a multiple of the block

Some comparisons in the body, and some bounds of its accesses, hold for all lanes of a tile from some tile on, or up to
some tile. The fold is split where the last condition begins to hold, and where the first condition ceases to hold. In
between, all conditions hold: comparisons are true, and dims are in bounds. In causal attention, this part is the tiles
below the diagonal. Then come the tiles on the diagonal, then the ragged tile, which gets a fold of its own, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import pairwise

from tilekern.ir.analysis.affine import Lines
from tilekern.ir.analysis.ranges import analyze, update
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import INDEX
from tilekern.passes.middle_tiles import Middle, Proof, crossing


def split_loops(func: Func) -> Func:
    """Apply the rewrite above to every fold that has such masks."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold) or op.axis.tiles < 2:
            return None
        lines = Lines(op, rewriter.definition, ranges)
        proof = Proof(op, lines)
        return _split(op, proof, lines, rewriter) if proof.lines else None

    return Rewriter(rule).run(func)


def _split(op: Fold, proof: Proof, lines: Lines, rewriter: Rewriter) -> Sequence[Value]:
    """The results of the parts, which run one after the other; the bounds between parts are multiples of the block."""
    make = Make(rewriter)
    full = make.number(op.axis.full_tiles, INDEX)
    rising = [crossing(make, line, lines, op.axis.tiles) for line in proof.lines if line.slope > 0]
    falling = [crossing(make, line, lines, op.axis.tiles) for line in proof.lines if line.slope < 0]
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
        cloner = Middle(proof) if number == middle else Cloner()
        body = cloner.copy_block(op.body)
        carries = rewriter.add(op.copy((start, stop, *carries), (body,)))
    return carries
