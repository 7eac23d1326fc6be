"""Grid loops: loops that become the last axis of the grid.

If the arrays that a loop reads do not fit VMEM as a whole, Pallas' pipeline fetches them tile by tile: the loop over
tiles becomes the last axis of the grid, and its carries stay in VMEM from step to step. Each step recomputes the cheap
values from before the loop that it uses; expensive values are computed in the first step and saved. Ops behind the
loop run in the last step.

    without a table   one step for each tile of the axis; a step outside of the loop's bounds is dead: it computes
                      nothing, and fetches the blocks of the next live step
    step table        one step for each tile inside of the bounds, if these do not depend on arrays: a table in scalar
                      memory holds the program and the tile of each step, so no step is dead
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.ordering import LinearScan, Scan, Sort, TopK
from tilekern.ir.records import record
from tilekern.lower.mosaic.calibration import MAX_TABLE_STEPS
from tilekern.lower.mosaic.plan.inequalities import Inequalities
from tilekern.lower.mosaic.plan.scalars import Scalars

_EXPENSIVE = (Dot, Fold, While, Switch, Scan, LinearScan, Sort, TopK)


@record(eq=False)
class GridLoop:
    """A chain of folds as the last axis of the grid.

    Attributes:
      chain: folds over one axis; each starts behind its predecessor, and takes the predecessor's carries.
      before, after: the ops before the chain and between its folds, and the ops behind it.
      saved: values from before the chain that are computed in the first step only.
      table_axes: the axes of the grid, by number, whose places the step table holds; empty without a table.
      table: the step table, int32 [2 + table_axes, steps]; None if there is none. Its rows: the tile; flags (1: first
        step of its program, 2: last step, 4: the step is live); then the place along each of `table_axes`.
    """

    chain: tuple[Fold, ...]
    before: tuple[Op, ...]
    after: tuple[Op, ...]
    saved: tuple[Value, ...]
    table_axes: tuple[int, ...] = ()
    table: Array | None = None

    @property
    def index(self) -> Value:
        """The index of the first fold, which stands for the indices of all folds."""
        return self.chain[0].body.args[0]

    @property
    def reverse(self) -> bool:
        """True if the tiles are in descending order."""
        return self.chain[0].reverse

    @property
    def steps(self) -> int:
        """The number of steps along the axis of the grid."""
        return self.chain[0].axis.tiles if self.table is None else self.table.shape[1]


def find_grid_loop(func: Func) -> GridLoop | None:
    """The folds at the top level of a Func as a grid loop; None unless they are one chain."""
    ops = func.body.ops
    folds = [n for n, op in enumerate(ops) if isinstance(op, Fold)]
    if not folds:
        return None
    first, last = folds[0], folds[-1]
    chain = tuple(op for op in ops if isinstance(op, Fold))
    between = [op for op in ops[first:last] if not isinstance(op, Fold)]
    carried = {result for fold in chain for result in fold.results}
    mixed = any(op.regions or not op.pure or carried & set(op.operands) for op in between)
    if not _is_chain(chain, Inequalities(func)) or mixed or chain[0].axis.tiles == 0:
        return None
    passed = carried - {*chain[-1].results}
    uses = [use for op in ops for use in op.uses() if use in passed]
    if len(uses) > len(set(uses)):
        return None  # the next loop of the chain has overwritten what another op would read
    before, after = (*ops[:first], *between), ops[last + 1 :]
    outputs = {p for p in func.params if p.ref.role != "in"}
    inner_ops = (inner for op in before for inner in op.walk())
    if any(isinstance(op, MemoryOp) and op.ref in outputs for op in inner_ops):
        return None  # a step would read the stores of a later step
    return GridLoop(chain, before, after, _saved_values(before, (*(f.body for f in chain),), after))


def _is_chain(chain: Sequence[Fold], order: Inequalities) -> bool:
    """True if each fold starts behind the stops of all before it, so that two folds share one tile at most."""

    def axis(fold: Fold) -> tuple[int, int, bool]:
        return fold.axis.extent, fold.axis.block, fold.reverse

    for earlier, later in pairwise(chain):
        if axis(earlier) != axis(later) or later.inits != earlier.results:
            return False
    ascending = chain[::-1] if chain[0].reverse else chain
    return all(order.at_most(low.stop, high.start) for low, high in combinations(ascending, 2))


def _saved_values(before: Sequence[Op], bodies: Sequence[Block], after: Sequence[Op]) -> tuple[Value, ...]:
    """The expensive tiles from before the chain that are used later."""
    slow = set[Value]()
    for op in before:
        if isinstance(op, _EXPENSIVE) or any(v in slow for v in op.operands):
            slow.update(op.results)
    later = (*after, *(op for block in bodies for op in block.ops))
    used = {v for op in later for v in op.uses()} | {v for block in bodies for v in block.results}
    return tuple(v for op in before for v in op.results if v in slow and v in used and v.tile.shape)


def with_step_table(func: Func, grid_loop: GridLoop, scalars: Scalars) -> GridLoop | None:
    """The grid loop with a step table; None if its bounds depend on arrays, or on no axis of the grid."""
    fold = grid_loop.chain[0]
    if any(p.ref.role not in ("in", "out") for p in func.params):
        return None  # index maps could not tell the first step that writes a block
    bounds = [b for fold in grid_loop.chain for b in (fold.start, fold.stop)]
    if any(scalars.key(b) is None or scalars.reads_array(b) for b in bounds):
        return None
    args = func.body.args
    depends = frozenset[Value]().union(*(scalars.axes(b) for b in bounds))
    axes = tuple(n for n, arg in enumerate(args) if arg in depends)
    if not axes or not 0 < np.prod([func.grid[n] for n in axes]) <= MAX_TABLE_STEPS:
        return None
    columns: list[tuple[int, ...]] = []
    for place in product(*(range(func.grid[n]) for n in axes)):
        indices = {args[n]: np.int32(i) for n, i in zip(axes, place, strict=True)}
        places = [int(scalars.evaluate_numpy(b, indices)) for b in bounds]
        runs = zip(places[::2], places[1::2], strict=True)
        live = {t for start, stop in runs for t in range(fold.axis.first_tile(start), fold.axis.end_tile(stop))}
        tiles = sorted(live, reverse=grid_loop.reverse)
        steps = [(t, 4) for t in tiles] or [(0, 0)]
        for n, (tile, flags) in enumerate(steps):
            ends = (1 if n == 0 else 0) | (2 if n == len(steps) - 1 else 0)
            columns.append((tile, flags | ends, *place))
    if len(columns) > MAX_TABLE_STEPS:
        return None
    table = np.asarray(columns, np.int32).T
    return GridLoop(grid_loop.chain, grid_loop.before, grid_loop.after, grid_loop.saved, axes, table)
