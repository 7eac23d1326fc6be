"""Compute the dots of the next iteration before the other ops of this iteration, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes, which removes ops that the copies leave unused.

    fold k with c {                               → d = dot(load x[first], load y[first])
      s = dot(load x[k], load y[k])                 fold k with c, s = d {
      yield dot(f(s, c), load z[k])                   d = dot(load x[min(k + 1, last)], load y[min(k + 1, last)])
    }                                                 yield dot(f(s, c), load z[k]), d
                                                    }

A dot that needs no carry, and on which another dot of the same iteration depends, is computed one iteration ahead and
becomes a carry. A machine that runs matrix and vector units side by side then computes f while the next dot runs, as
attention does with softmax and the next tile's logits. Dots that only add up (a matmul) stay: no other ops could run
beside them.

Results that the last iteration computes ahead are not used. The tile that it reads is a tile of the fold, where reads
were proved in bounds (`elide_masks` proves it anew). So is the first tile of a fold that runs none. Only inputs are
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.analysis.ranges import Interval, analyze, fold_index, update
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Builder, Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Cloner, Rewriter


def skew_carries(func: Func) -> Func:
    """Apply the rewrite above to every fold that has such dots."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold):
            return None
        tiles = fold_index(op, ranges.get(op.start), ranges.get(op.stop))
        dots = _leading_dots(op.body)
        return _skew(op, dots, tiles, rewriter) if dots and tiles.low < tiles.high else None

    return Rewriter(rule).run(func)


def _leading_dots(body: Block) -> list[Op]:
    """The dots that depend on no carry and no other dot, and that another dot of the body depends on."""
    carried = set(body.args[1:])
    before: dict[Value, frozenset[Op]] = {}  # the leading dots that a value depends on
    followed: set[Op] = set()
    leading: list[Op] = []
    for op in body.ops:
        used = set(op.uses())
        earlier = frozenset[Op]().union(*(before.get(v, frozenset()) for v in used))
        if isinstance(op, Dot):
            followed |= earlier
        movable = not op.regions and (op.pure or (isinstance(op, Load) and op.ref.ref.role == "in"))
        if not movable or not carried.isdisjoint(used):
            carried.update(op.results)
        elif isinstance(op, Dot) and not earlier:
            leading.append(op)
            earlier = frozenset([op])
        before.update(dict.fromkeys(op.results, earlier))
    return [op for op in leading if op in followed]


def _skew(op: Fold, dots: list[Op], tiles: Interval, rewriter: Rewriter) -> Sequence[Value]:
    needed = backward_slice(op.body.ops, [dot.result for dot in dots])
    index, *carries = op.body.args
    ahead = _computed_at(_first(op, tiles, Make(rewriter)), needed, index, rewriter)
    fresh = {v: Value(v.type, v.name) for v in (index, *carries, *(d.result for d in dots))}
    cloner = Cloner()
    for old, new in fresh.items():
        cloner.replace(old, new)

    def body(*_: Value) -> tuple[Value, ...]:
        following = _computed_at(_next(op, fresh[index], tiles, Make(cloner)), needed, index, cloner)
        for inner in op.body.ops:
            if inner not in dots:
                cloner.visit(inner)
        return *(cloner.value(v) for v in op.body.results), *(following[d.result] for d in dots)

    block = cloner.block(tuple(fresh.values()), body)
    skewed = op.copy((*op.operands, *(ahead[d.result] for d in dots)), (block,))
    return rewriter.add(skewed)[: len(op.results)]


def _computed_at(tile: Value, ops: Sequence[Op], index: Value, builder: Builder) -> Mapping[Value, Value]:
    """The results of copies of `ops` at another tile."""
    values = {index: tile}
    for op in ops:
        copy = op.copy(tuple(values.get(v, v) for v in op.operands))
        if isinstance(copy, Load):
            copy = replace(copy, access=copy.access.marked(False for _ in copy.access.dims))
        values.update(zip(op.results, builder.add(copy), strict=True))
    return values


def _first(op: Fold, tiles: Interval, make: Make) -> Value:
    """The first tile that runs; a tile of `tiles` even if no tile runs."""
    axis = op.axis
    bound = op.stop if op.reverse else op.start
    inside = make.of("min", make.of("max", bound, 0), axis.extent)
    if not op.reverse:
        return make.of("min", make.of("div", inside, axis.block), tiles.high)
    # The tile of the element before the stop; -1 div block would be 0, which the stop 0 may give as well.
    return make.of("max", make.of("div", make.of("sub", inside, 1), axis.block), tiles.low)


def _next(op: Fold, tile: Value, tiles: Interval, make: Make) -> Value:
    """The tile after `tile`; after the last tile, the last tile again."""
    if op.reverse:
        return make.of("max", make.of("sub", tile, 1), tiles.low)
    return make.of("min", make.of("add", tile, 1), tiles.high)
