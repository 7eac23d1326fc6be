"""Pipelined loops: loops inside of the kernel, each with a pipeline that fetches its tiles from HBM.

While one tile is computed, the pipeline fetches the next one. It serves several loops in sequence, and loops whose
bounds depend on arrays, for which an axis of the grid would have many steps without a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Dim, MemoryOp, Store
from tilekern.ir.records import record
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Window, axes_of


@record(eq=False)
class Pipeline:
    """The arrays of one pipelined loop.

    Attributes:
      inputs: the windows of inputs that change with the loop's index.
      outputs: the outputs whose blocks change with the loop's index.
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


def find_pipelines(
    func: Func, windows: Mapping[MemoryOp, Window], scalars: Scalars, ranges: Mapping[Value, Interval]
) -> dict[Fold, Pipeline] | None:
    """The pipelines of the loops of the top level; None without pipelines, or if an output forbids them.

    Args:
      func: the Func.
      windows: the window of each access.
      scalars: the known scalars, after `add_loop_indices`.
      ranges: the known intervals of integers.
    """
    pipelines: dict[Fold, Pipeline] = {}
    moving = set[Value]()
    for fold in func.body.ops:
        if not isinstance(fold, Fold):
            continue
        index = scalars.canonical(fold.body.args[0])
        inputs: dict[Window, None] = {}
        outputs: dict[Value, None] = {}
        for op in fold.body.walk():
            if not isinstance(op, MemoryOp) or 0 in op.ref.ref.shape or index not in axes_of(windows[op], scalars):
                continue
            if op.ref.ref.role == "in":
                inputs[windows[op]] = None
            else:
                outputs[op.ref] = None
        if inputs or outputs:
            pipelines[fold] = Pipeline(tuple(inputs), tuple(outputs))
            moving.update(outputs)
    whole = all(_is_block_output(func, p, windows, pipelines, ranges) for p in moving)
    return pipelines if pipelines and whole else None


def _is_block_output(
    func: Func,
    param: Value,
    windows: Mapping[MemoryOp, Window],
    pipelines: Mapping[Fold, Pipeline],
    ranges: Mapping[Value, Interval],
) -> bool:
    """True if each iteration of a pipelined loop with a block of an output writes the whole block, at its top level.

    A pipeline does not read blocks of outputs from HBM: elements that an iteration leaves out would be overwritten by
    stale VMEM. So stores are unmasked, begin inside of the array, and together cover the block.
    """
    if param.ref.role != "out":
        return False
    stores = [[op for op in fold.body.ops if isinstance(op, Store) and op.ref is param] for fold in pipelines]
    flat = [op for ops in stores for op in ops]
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
    if len(flat) != len(accesses) or any(op.masked for op in accesses):
        return False
    if len({windows[op].dims for op in flat}) != 1:
        return False
    (window_dims,) = {windows[op].dims for op in flat}
    static = [d for d, window_dim in enumerate(window_dims) if window_dim.kind == "static"]
    moving = [d for d, window_dim in enumerate(window_dims) if window_dim.kind in ("at", "tiled")]
    inside = all(_begins_inside(op, d, ranges) for op in flat for d in moving)
    whole = all(_cover([[op.access.dims[d] for d in static] for op in ops], param, static) for ops in stores if ops)
    return len(static) + len(moving) == len(window_dims) and inside and whole


def _begins_inside(op: MemoryOp, d: int, ranges: Mapping[Value, Interval]) -> bool:
    interval = position_interval(op.access.dims[d].position, [ranges.get(v) for v in op.positions])
    return interval is not None and interval.within(0, op.ref.ref.shape[d] - 1)


def _cover(boxes: Sequence[Sequence[Dim]], param: Value, dims: Sequence[int]) -> bool:
    """True if boxes at constant places together contain all elements along some dims of an array."""
    lengths = [param.ref.shape[d] for d in dims]

    def slices(box: Sequence[Dim]) -> list[tuple[int, int]]:
        return [
            (max(0, d.position.const), min(n, d.position.const + d.size)) for d, n in zip(box, lengths, strict=True)
        ]

    spans = [slices(box) for box in boxes]
    if any(all(part == (0, n) for part, n in zip(box, lengths, strict=True)) for box in spans):
        return True
    covered = np.zeros(lengths, np.bool_)
    for box in spans:
        if all(low < high for low, high in box):
            covered[tuple(slice(low, high) for low, high in box)] = True
    return bool(covered.all())
