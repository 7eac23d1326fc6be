"""Loops that become an axis of the grid.

Where the arrays that a loop reads do not fit VMEM as a whole, Pallas' own pipeline shall fetch them tile by tile: the
loop over tiles becomes the last axis of the grid, its carries stay in VMEM from step to step. What stands before the
loop is computed again wherever a step needs it, or once and kept, if that takes time; what stands behind runs in the
last step.

    steps   a step for each tile of the axis; steps outside of the bounds do nothing, and fetch what comes next
    pairs   a step for each tile that runs, where that is known beforehand: a table says which program and tile a step
            is of, so that no step is dead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.ordering import Scan, Sort, TopK
from tilekern.lower.mosaic.plan.comparisons import Order
from tilekern.lower.mosaic.plan.scalars import Scalars

_SLOW = (Dot, Fold, While, Switch, Scan, Sort, TopK)
_MOST_STEPS = 1 << 15  # of a table: three words of scalar memory each, out of a megabyte


@dataclass(frozen=True, eq=False)
class Serial:
    """A chain of folds as the last axis of the grid.

    Attributes:
      chain: folds over one axis, each going on behind the one before, with its carries.
      before, after: the ops before the chain (and between its folds), and behind it.
      kept: values from before the chain which are computed once.
      pairs: for "pairs", the axes of the grid (their numbers) that have no axis of their own any more; a column of
        `table` gives each.
      table: int32 [2 + axes, steps]: the tile, flags (1: first step of its programs, 2: last one, 4: a tile runs), then
        the axes.
    """

    chain: tuple[Fold, ...]
    before: tuple[Op, ...]
    after: tuple[Op, ...]
    kept: tuple[Value, ...]
    pairs: tuple[int, ...] = ()
    table: Array | None = None

    @property
    def index(self) -> Value:
        """What stands for the tile in all folds."""
        return self.chain[0].body.args[0]

    @property
    def reverse(self) -> bool:
        """Whether tiles run in descending order."""
        return self.chain[0].reverse

    @property
    def steps(self) -> int:
        """How long the axis of the grid is."""
        return self.chain[0].axis.tiles if self.table is None else self.table.shape[1]


def serial_of(func: Func) -> Serial | None:
    """The one chain of folds of a Func as an axis, if it is one chain, at the top level."""
    ops = func.body.ops
    folds = [n for n, op in enumerate(ops) if isinstance(op, Fold)]
    if not folds:
        return None
    first, last = folds[0], folds[-1]
    chain = tuple(op for op in ops if isinstance(op, Fold))
    between = [op for op in ops[first:last] if not isinstance(op, Fold)]
    carried = {result for fold in chain for result in fold.results}
    mixed = any(op.regions or not op.pure or carried & set(op.operands) for op in between)
    if not _is_chain(chain, Order(func)) or mixed or chain[0].axis.tiles == 0:
        return None
    before, after = (*ops[:first], *between), ops[last + 1 :]
    outputs = {p for p in func.params if p.ref.role != "in"}
    every = (inner for op in before for inner in op.walk())
    if any(isinstance(op, MemoryOp) and op.ref in outputs for op in every):
        return None  # a step would see what a later one stored
    return Serial(chain, before, after, _kept(before, (*(f.body for f in chain),), after))


def _is_chain(chain: Sequence[Fold], order: Order) -> bool:
    """Whether each fold goes on behind all before it; so no two of them have more than one tile in common."""

    def axis(fold: Fold) -> tuple[int, int, bool]:
        return fold.axis.extent, fold.axis.block, fold.reverse

    for one, other in pairwise(chain):
        if axis(one) != axis(other) or other.inits != one.results:
            return False
    ascending = chain[::-1] if chain[0].reverse else chain
    return all(order.at_most(low.stop, high.start) for low, high in combinations(ascending, 2))


def _kept(before: Sequence[Op], bodies: Sequence[Block], after: Sequence[Op]) -> tuple[Value, ...]:
    """The values from before that are used later and take long."""
    slow = set[Value]()
    for op in before:
        if isinstance(op, _SLOW) or any(v in slow for v in op.operands):
            slow.update(op.results)
    later = (*after, *(op for block in bodies for op in block.ops))
    used = {v for op in later for v in op.uses()} | {v for block in bodies for v in block.results}
    return tuple(v for op in before for v in op.results if v in slow and v in used and v.tile.shape)


def as_pairs(func: Func, serial: Serial, scalars: Scalars) -> Serial | None:
    """The same chain with a table of its steps, if the bounds do not depend on arrays."""
    fold = serial.chain[0]
    if any(p.ref.role not in ("in", "out") for p in func.params):
        return None  # where a block is written first would not be seen from the place in the grid
    bounds = [b for fold in serial.chain for b in (fold.start, fold.stop)]
    if any(scalars.key(b) is None or scalars.reads(b) for b in bounds):
        return None
    args = func.body.args
    depends = frozenset[Value]().union(*(scalars.axes(b) for b in bounds))
    axes = tuple(n for n, arg in enumerate(args) if arg in depends)
    if not axes or not 0 < np.prod([func.grid[n] for n in axes]) <= _MOST_STEPS:
        return None
    columns: list[tuple[int, ...]] = []
    for place in product(*(range(func.grid[n]) for n in axes)):
        given = {args[n]: np.int32(i) for n, i in zip(axes, place, strict=True)}
        places = [int(scalars.beforehand(b, given)) for b in bounds]
        runs = zip(places[::2], places[1::2], strict=True)
        live = {t for start, stop in runs for t in range(fold.axis.first_tile(start), fold.axis.end_tile(stop))}
        tiles = sorted(live, reverse=serial.reverse)
        steps = [(t, 4) for t in tiles] or [(0, 0)]
        for n, (tile, flags) in enumerate(steps):
            ends = (1 if n == 0 else 0) | (2 if n == len(steps) - 1 else 0)
            columns.append((tile, flags | ends, *place))
    if len(columns) > _MOST_STEPS:
        return None
    table = np.asarray(columns, np.int32).T
    return Serial(serial.chain, serial.before, serial.after, serial.kept, axes, table)
