"""Batching: the programs of the grid that run at once.

Programs along an axis are *batched*: they are computed together, and every value has one more leading dim. An axis is
not batched if control flow depends on it (bounds of a fold, the branch of a switch, the end of a while), or if the
position of a store does not. XLA runs batched work on all of its threads, and loops on one. The size of a batch is
limited, so that its tiles stay in the caches and scratch memory does not grow with the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value, cdiv
from tilekern.ir.memory import Store
from tilekern.ir.records import record
from tilekern.lower.xla import calibration

Axes = frozenset[int]
NONE: Axes = frozenset()


@record
class Segment:
    """`chunks` times `count` consecutive tiles of an axis, from tile `first` on; the tiles of a chunk are batched."""

    first: int
    chunks: int
    count: int


@record
class BatchPlan:
    """The order of the grid's programs, in batches.

    Attributes:
      segments: segments of each axis, in order; full tiles never share a segment with the ragged last tile.
      varying: the grid axes that each value depends on.
    """

    segments: tuple[tuple[Segment, ...], ...]
    varying: dict[Value, Axes]


def plan_batches(func: Func) -> BatchPlan:
    """Choose the batched axes, the last declared first, while the batch fits `BATCH_BYTES`."""
    analysis = _Varying(func)
    room = max(1, calibration.BATCH_BYTES // max((_largest(op) for op in func.walk()), default=1))
    fixed = analysis.control | _not_stored_along(func)
    segments: list[tuple[Segment, ...]] = []
    for number, axis in reversed(list(enumerate(func.axes))):
        count = 1 if number in fixed else balanced_count(axis.full_tiles, room)
        room //= max(1, count)
        segments.insert(0, split_axis(axis, count))
    return BatchPlan(tuple(segments), analysis.of)


def balanced_count(tiles: int, limit: int) -> int:
    """The batch of at most `limit` that cuts `tiles` into chunks of nearly equal size."""
    return cdiv(tiles, cdiv(tiles, max(1, limit))) if tiles else 1


def split_axis(axis: Axis, count: int) -> tuple[Segment, ...]:
    """An axis in chunks of `count` tiles, a smaller chunk, and the ragged tile; empty segments left out."""
    full = axis.full_tiles
    remainder = full % count
    parts = (
        Segment(0, full // count, count),
        Segment(full - remainder, min(remainder, 1), remainder),
        Segment(full, axis.tiles - full, 1),
    )
    return tuple(part for part in parts if part.chunks)


def _largest(op: Op) -> int:
    return max((v.tile.nbytes for v in op.results), default=1) or 1


def _not_stored_along(func: Func) -> Axes:
    """Axes that the position of some store does not depend on: their programs would store the same elements."""
    missing: set[int] = set()
    for op in func.walk():
        if isinstance(op, Store):
            missing |= {n for n, index in enumerate(func.body.args) if index not in op.positions}
    return frozenset(missing)


class _Varying:
    """Dependence on the grid axes.

    Attributes:
      of: axes that each value depends on.
      control: axes that control flow depends on.
    """

    def __init__(self, func: Func) -> None:
        self.of: dict[Value, Axes] = {index: frozenset({n}) for n, index in enumerate(func.body.args)}
        self.control: Axes = NONE
        self._block(func.body)

    def _union(self, values: Iterable[Value]) -> Axes:
        return NONE.union(*(self.of.get(v, NONE) for v in values))

    def _block(self, block: Block) -> None:
        for op in block.ops:
            self._op(op)

    def _op(self, op: Op) -> None:
        match op:
            case Fold():
                bounds = self._union((op.start, op.stop))
                self.control |= bounds
                self.of[op.body.args[0]] = bounds
                self._loop(op, op.inits, op.body.args[1:])
            case While():
                self._loop(op, op.operands, op.body.args)
                self.control |= self._union(op.condition.results)
            case Switch():
                self.control |= self._union(op.operands)
                for region in op.regions:
                    self._block(region)
                for results in zip(op.results, *(region.results for region in op.regions), strict=True):
                    self.of[results[0]] = self._union((*op.operands, *results[1:]))
            case _:
                axes = self._union(op.operands)
                self.of.update(dict.fromkeys(op.results, axes))

    def _loop(self, op: Op, inits: tuple[Value, ...], carries: tuple[Value, ...]) -> None:
        """Propagate dependences through a loop: from initial values and yields to carries, until nothing changes."""
        now = [self._union((v,)) for v in inits]
        while True:
            for region in op.regions:
                self.of.update(zip(region.args[len(region.args) - len(carries) :], now, strict=True))
                self._block(region)
            after = [a | self._union((v,)) for a, v in zip(now, op.regions[-1].results, strict=True)]
            if after == now:
                break
            now = after
        self.of.update(zip(op.results, now, strict=True))
