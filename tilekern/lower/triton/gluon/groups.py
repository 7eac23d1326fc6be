"""Groups of programs: which programs of a grid share a thread block, and which of their loads they share.

A thread block runs `count` neighbouring programs along one axis of the grid, one on each of its warpgroups. A load
whose place does not depend on that axis is done once for the whole group. Along the chosen axis loops share most bytes.
Loops around loops of products run equally often for all programs of a group: only a loop that loads can skip the tiles
of another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value, cdiv
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.lower.triton.calibration import UNBALANCED
from tilekern.lower.triton.gluon.rotation import loaded
from tilekern.lower.triton.plan.tma import TmaCopy

WARPS = 4
"""Warps of a warpgroup."""

# Registers of a thread: of all threads when a program starts, of threads that compute, and of threads that load. A
# multiprocessor has 65,536, and a warpgroup gets them in units of 8 for each of its threads (PTX ISA, `setmaxnreg`).
REGISTERS = {1: (248, 248, 40), 2: (168, 240, 24), 3: (128, 160, 32)}
"""For each number of warpgroups that compute."""


@record
class Group:
    """The programs of a thread block.

    Attributes:
      axis: number of the grid's axis along which the programs are neighbours.
      count: programs of a group.
      axes: the grid's axes, with groups in place of programs along that axis.
      order: the numbers of the axes, the fastest last.
      varying: values that differ between the programs of a group.
    """

    axis: int
    count: int
    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    varying: frozenset[Value]

    @property
    def blocks(self) -> int:
        """Groups of the whole grid."""
        return prod(axis.tiles for axis in self.axes)


def group_programs(func: Func, count: int, copies: Mapping[Op, TmaCopy], cores: int) -> Group:
    """The groups of a grid, of `count` programs each; the last one repeats a program if their number is uneven.

    Args:
      func: a legal Func.
      count: programs of a group, at most.
      copies: the copies by TMA.
      cores: thread blocks that take groups in turn.
    """
    if not func.axes:
        return Group(-1, 1, func.axes, (), frozenset())
    grouped = [_group(func, number, count, cores) for number in range(len(func.axes))]
    choices = [group for group in grouped if _run_equally(func, group)] or [_group(func, 0, 1, cores)]
    return max(choices, key=lambda group: (_shared_bytes(func, group, copies), -_waste(func, group)))


def _group(func: Func, number: int, count: int, cores: int) -> Group:
    axis = func.axes[number]
    count = min(count, max(1, axis.tiles))
    fewer = replace(axis, extent=cdiv(axis.tiles, count), block=1, group=cdiv(axis.group, count))
    axes = (*func.axes[:number], fewer, *func.axes[number + 1 :])
    return Group(number, count, axes, _order(axes, cores), frozenset(_varying(func.body, func.body.args[number])))


def _order(axes: tuple[Axis, ...], cores: int) -> tuple[int, ...]:
    """The order in which groups run: an axis whose programs become shorter runs slowest, if that balances blocks.

    Along a descending axis the time of a program is taken to be proportional to its index. Thread blocks take groups in
    turn; for some numbers of blocks and groups, some blocks would get long groups only. Where the times differ little,
    the order stays, for neighbouring programs find their loads in the cache.
    """
    grid_order = tuple(range(len(axes)))
    falling = [n for n in grid_order if axes[n].descending and axes[n].tiles > 1]
    if len(falling) != 1 or any(axis.group for axis in axes):
        return grid_order
    moved = (*falling, *(n for n in grid_order if n not in falling))
    excess = [_excess(axes, order, falling[0], cores) for order in (grid_order, moved)]
    return moved if excess[1] < excess[0] - UNBALANCED else grid_order


def _excess(axes: tuple[Axis, ...], order: tuple[int, ...], falling: int, cores: int) -> float:
    """The time of the thread block that has most to do, relative to the mean; see `Role` for the turns."""
    shape = tuple(axes[n].tiles for n in order)
    indices = np.indices(shape, sparse=True)[order.index(falling)]
    times = np.broadcast_to(axes[falling].tiles - indices, shape).reshape(-1)
    width = min(cores, times.size)
    rounds = np.pad(times, (0, -times.size % width)).reshape(-1, width)
    rounds[1::2] = rounds[1::2, ::-1]
    sums = rounds.sum(axis=0)
    return float(sums.max() / sums.mean())


def _run_equally(func: Func, group: Group) -> bool:
    """True if no bounds of a loop around loops of products differ between the programs of a group."""
    folds = [op for op in func.walk() if isinstance(op, Fold)]
    around = [op for op in folds if any(isinstance(f, Fold) and multiplies(f.body) for f in op.body.walk())]
    return group.count == 1 or all(group.varying.isdisjoint((op.start, op.stop)) for op in around)


def multiplies(block: Block) -> bool:
    """True if a block's own ops include a product."""
    return any(isinstance(op, Dot) for op in block.ops)


def _varying(body: Block, index: Value) -> set[Value]:
    """The values that depend on an index, other than through the number of iterations of a loop."""
    varying = {index}

    def visit(block: Block) -> None:
        for op in block.ops:
            if isinstance(op, Fold):
                # The carries may depend on the index through the body's reads.
                varying.update((*op.body.args[1:], *op.results))
            for region in op.regions:
                visit(region)
            if not varying.isdisjoint(op.uses()):
                varying.update(op.results)

    visit(body)
    return varying


def _shared_bytes(func: Func, group: Group, copies: Mapping[Op, TmaCopy]) -> int:
    """Bytes that an iteration of the loops loads once instead of `count` times.

    Without tiles of 8 bits on the right side of a product: each program casts its tile, a shared tile `count` times.
    """
    loads = [
        op
        for fold in func.walk()
        if isinstance(fold, Fold)
        for op in fold.body.ops
        if isinstance(op, Load) and op in copies and group.varying.isdisjoint(op.operands)
        if not (op.result.tile.dtype.itemsize == 1 and _is_right(op, fold))
    ]
    return (group.count - 1) * sum(op.result.tile.size * op.result.tile.dtype.itemsize for op in loads)


def _is_right(load: Load, fold: Fold) -> bool:
    dots = (op for op in fold.body.ops if isinstance(op, Dot))
    return any(loaded(dot.operands[1], fold.body.ops) is load for dot in dots)


def _waste(func: Func, group: Group) -> int:
    """The number of loops whose bounds differ between the programs of a group, so that some wait for others."""
    folds = [op for op in func.walk() if isinstance(op, Fold)]
    return sum(not group.varying.isdisjoint((fold.start, fold.stop)) for fold in folds)


def folds_of(block: Block) -> list[Fold]:
    """All loops of a block, inner loops included."""
    return [op for op in block.walk() if isinstance(op, Fold)]
