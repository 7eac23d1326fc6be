"""Pipelined loops: loops inside of the kernel, each with a pipeline that fetches its tiles from HBM.

While one tile is computed, the pipeline fetches the next one. It serves several loops in sequence, and loops whose
bounds depend on arrays, for which an axis of the grid would have many steps without a tile.
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
class Pipeline:
    """The arrays of one pipelined loop.

    Attributes:
      inputs: the windows of inputs that change with the loop's index.
      outputs: the outputs whose blocks change with it.
    """

    inputs: tuple[Window, ...]
    outputs: tuple[Value, ...]


def add_loop_indices(func: Func, scalars: Scalars) -> None:
    """Make the indices of all loops of the top level known; loops over equal axes share one index."""
    first: dict[tuple[int, int], Value] = {}
    for fold in func.body.ops:
        if isinstance(fold, Fold):
            index = fold.body.args[0]
            scalars.add_loop_index(index, first.setdefault((fold.axis.extent, fold.axis.block), index))


def find_pipelines(func: Func, windows: Mapping[MemoryOp, Window], scalars: Scalars) -> dict[Fold, Pipeline] | None:
    """The pipelines of the loops of the top level; None if there is none, or if an output forbids them.

    Args:
      func: the Func.
      windows: the window of each access.
      scalars: the known scalars, after `add_loop_indices`.
    """
    found: dict[Fold, Pipeline] = {}
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
            found[fold] = Pipeline(tuple(inputs), tuple(outputs))
            moving.update(outputs)
    return found if found and all(_is_block_output(func, p, windows, found) for p in moving) else None


def _is_block_output(
    func: Func, param: Value, windows: Mapping[MemoryOp, Window], pipelines: Mapping[Fold, Pipeline]
) -> bool:
    """True if an output is written by unmasked stores of whole blocks only, at the top of pipelined loops."""
    if param.ref.role != "out":
        return False
    stores = [op for fold in pipelines for op in fold.body.ops if isinstance(op, Store) and op.ref is param]
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
    if len(stores) != len(accesses) or any(op.masked for op in accesses):
        return False
    if len({windows[op].dims for op in stores}) != 1:
        return False
    return all(window_dim.kind in ("at", "tiled", "static") for op in stores for window_dim in windows[op].dims)
