"""Loops that fetch what they read by a pipeline of their own, inside of the kernel.

The arrays stay in HBM; while one tile is computed, the next one is on its way. That serves loops whose bounds depend on
arrays, where an axis of the grid would have many dead steps, and several loops one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import MemoryOp, Store
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Window, axes_of


@dataclass(frozen=True, eq=False)
class Pipe:
    """What one loop fetches and writes.

    Attributes:
      inputs: the windows of inputs that follow the loop's tiles.
      outputs: the outputs that do.
    """

    inputs: tuple[Window, ...]
    outputs: tuple[Value, ...]


def count_loops(func: Func, scalars: Scalars) -> None:
    """Let the indices of the loops of the top level be known; of loops over one axis, they are one."""
    first: dict[tuple[int, int], Value] = {}
    for fold in func.body.ops:
        if isinstance(fold, Fold):
            index = fold.body.args[0]
            scalars.count(index, first.setdefault((fold.axis.extent, fold.axis.block), index))


def pipes_of(func: Func, windows: Mapping[MemoryOp, Window], scalars: Scalars) -> dict[Fold, Pipe] | None:
    """The pipelines of all loops of the top level that follow arrays; None if an output forbids it.

    Args:
      func: the Func.
      windows: how accesses see their arrays.
      scalars: which count the loops (`count_loops`).
    """
    found: dict[Fold, Pipe] = {}
    moving = set[Value]()
    for fold in func.body.ops:
        if not isinstance(fold, Fold):
            continue
        index = scalars.canonical(fold.body.args[0])
        inputs: dict[Window, None] = {}
        outputs: dict[Value, None] = {}
        for op in fold.body.walk():
            if not isinstance(op, MemoryOp) or index not in axes_of(windows[op], scalars):
                continue
            if op.ref.ref.role == "in":
                inputs[windows[op]] = None
            else:
                outputs[op.ref] = None
        if inputs or outputs:
            found[fold] = Pipe(tuple(inputs), tuple(outputs))
            moving.update(outputs)
    return found if found and all(_writes_whole_blocks(func, p, windows, found) for p in moving) else None


def _writes_whole_blocks(
    func: Func, param: Value, windows: Mapping[MemoryOp, Window], pipes: Mapping[Fold, Pipe]
) -> bool:
    """Whether an output is only ever stored, block by block, in each iteration of loops that go along it."""
    if param.ref.role != "out":
        return False
    stores = [op for fold in pipes for op in fold.body.ops if isinstance(op, Store) and op.ref is param]
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
    if len(stores) != len(accesses) or any(op.masked for op in accesses):
        return False
    if len({windows[op].roles for op in stores}) != 1:
        return False
    return all(role.kind in ("at", "tiled", "static") for op in stores for role in windows[op].roles)
