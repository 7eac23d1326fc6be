"""Groups of programs: which programs of a grid share a thread block, and which of their loads they share.

A thread block runs `count` neighbouring programs along one axis of the grid, one on each of its warpgroups. A load
whose place does not depend on that axis is done once for all of them. The axis is the one along which loops share most
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value, cdiv
from tilekern.ir.memory import Load
from tilekern.lower.triton.plan.tma import TmaCopy


@dataclass(frozen=True)
class Group:
    """The programs of a thread block.

    Attributes:
      axis: number of the grid's axis along which they are neighbours.
      count: how many there are.
      axes: the grid's axes, with groups in place of programs along that axis.
      varying: values that differ between the programs of a group.
    """

    axis: int
    count: int
    axes: tuple[Axis, ...]
    varying: frozenset[Value]

    @property
    def blocks(self) -> int:
        """Groups of the whole grid."""
        return prod(axis.tiles for axis in self.axes)


def group_programs(func: Func, count: int, copies: Mapping[Op, TmaCopy]) -> Group:
    """The groups of a grid, of `count` programs each; the last one repeats a program if their number is uneven."""
    choices = [_group(func, number, count) for number in range(len(func.axes))]
    if not choices:
        return Group(-1, 1, func.axes, frozenset())
    return max(choices, key=lambda group: (_shared_bytes(func, group, copies), -_waste(func, group)))


def _group(func: Func, number: int, count: int) -> Group:
    axis = func.axes[number]
    count = min(count, max(1, axis.tiles))
    fewer = replace(axis, extent=cdiv(axis.tiles, count), block=1, group=cdiv(axis.group, count))
    axes = (*func.axes[:number], fewer, *func.axes[number + 1 :])
    return Group(number, count, axes, frozenset(_varying(func.body, func.body.args[number])))


def _varying(body: Block, index: Value) -> set[Value]:
    """The values that depend on an index, but not by way of the number of iterations of a loop."""
    found = {index}

    def visit(block: Block) -> None:
        for op in block.ops:
            if isinstance(op, Fold):
                # What is carried may depend on it by what the body reads.
                found.update((*op.body.args[1:], *op.results))
            for region in op.regions:
                visit(region)
            if not found.isdisjoint(op.uses()):
                found.update(op.results)

    visit(body)
    return found


def _shared_bytes(func: Func, group: Group, copies: Mapping[Op, TmaCopy]) -> int:
    """Bytes that an iteration of the loops loads once instead of `count` times."""
    loads = [
        op
        for fold in func.body.ops
        if isinstance(fold, Fold)
        for op in fold.body.ops
        if isinstance(op, Load) and op in copies and group.varying.isdisjoint(op.operands)
    ]
    return (group.count - 1) * sum(op.result.tile.size * op.result.tile.dtype.itemsize for op in loads)


def _waste(func: Func, group: Group) -> int:
    """Loops whose bounds differ between the programs of a group, so that some of them wait for others."""
    folds = [op for op in func.body.ops if isinstance(op, Fold)]
    return sum(not group.varying.isdisjoint((fold.start, fold.stop)) for fold in folds)
