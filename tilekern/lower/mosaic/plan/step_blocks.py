"""Rules of the blocks of outputs, which steps of the grid and iterations of pipelines write. See `verify_plan`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from tilekern import source
from tilekern.ir.analysis.ranges import position_interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Value
from tilekern.ir.memory import MemoryOp, Store
from tilekern.lower.mosaic.calibration import MAX_ENUMERATED_STEPS
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.plan_rules import require
from tilekern.lower.mosaic.plan.windows import Window, WindowDim, tiles


def check_output_blocks(plan: KernelPlan) -> None:
    """Check the blocks of all outputs that the steps of the grid write.

    Raises:
      PlanError: a block returns, is not initialised once, or is shared by cores.
    """
    if 0 in plan.grid:
        return
    steps, semantics = _Steps(plan), plan.semantics
    in_order = plan.grid_loop is None or semantics[-1] == "arbitrary"
    require(in_order, "cores share the steps of a loop", "an arbitrary last axis", str(semantics))
    for param, layout in plan.outputs.items():
        if param in plan.pipelined_outputs:
            require("parallel" not in semantics, "cores share an output in HBM", "arbitrary axes", str(semantics))
            continue
        moving = plan.output_blocks.moving_axes(layout.window)
        dead = plan.grid_loop is not None and plan.grid_loop.table is None and moving[-1]
        stays = not (dead and plan.skips_dead_steps(layout))
        require(stays, f"dead steps have another block of {param.name}", "their own block", "that of a live step")
        blocks = steps.blocks(layout.window)
        if blocks is None:
            fixed = not any(moving)
            require(fixed, f"nobody knows the blocks of {param.name}", "one block, or places by indices", str(moving))
            blocks = np.zeros(1 if steps.coordinates is None else steps.count, np.int64)
        _check_visits(plan, param, blocks, moving, steps.coordinates)


def _check_visits(
    plan: KernelPlan, param: Value, blocks: Array, moving: Sequence[bool], coordinates: Array | None
) -> None:
    """Rule 4, given the block of each step."""
    name, count = param.name, len(np.unique(blocks))
    begins = np.ones(blocks.shape, np.bool_)
    begins[1:] = blocks[1:] != blocks[:-1]
    require(int(begins.sum()) == count, f"a block of {name} returns", f"{count} runs of steps", f"{begins.sum()} runs")
    if coordinates is None:
        return  # too many steps: one block, and the first step is the only one at 0 along all axes
    if param.ref.role != "out":
        still = [n for n, moves in enumerate(moving) if not moves]
        initial = (coordinates[still] == 0).all(axis=0)
        got = f"{int(initial.sum())} steps for {count} blocks"
        require(np.array_equal(initial, begins), f"a block of {name} is not initialised once", "its first step", got)
    if param.ref.role in ("zeros", "sum"):
        total = _count(plan.outputs[param].window)
        all_begin = count == total or param in plan.zeroed_outputs
        require(all_begin, f"blocks of {name} are never initialised", f"{total} blocks, or zeros", f"{count} blocks")
    for axis, semantics in zip(coordinates, plan.semantics, strict=False):
        if semantics == "parallel":
            pairs = np.unique(np.stack([blocks, axis]), axis=1).shape[1]
            require(pairs == count, f"cores share a block of {name}", f"{count} blocks on one core each", f"{pairs}")


class _Steps:
    """The steps of a grid, one after the other.

    Attributes:
      count: the number of steps.
      coordinates: the place of each step along each axis; None if there are too many steps.
    """

    def __init__(self, plan: KernelPlan) -> None:
        self._plan = plan
        self.count = prod(plan.grid)
        self.coordinates: Array | None = None
        if self.count <= MAX_ENUMERATED_STEPS:
            self.coordinates = np.stack(np.unravel_index(np.arange(self.count), plan.grid or (1,))).astype(np.int32)
            self._indices = self._index_values(self.coordinates)

    def _index_values(self, coordinates: Array) -> dict[Value, Array]:
        plan, args = self._plan, self._plan.func.body.args
        values = {args[n]: coordinates[k] for k, n in enumerate(plan.order)}
        loop = plan.grid_loop
        if loop is not None:
            step = coordinates[-1]
            if loop.table is None:
                values[loop.index] = loop.steps - 1 - step if loop.reverse else step
            else:
                tile, _, *places = loop.table[:, step]
                values[loop.index] = tile
                values.update({args[n]: place for n, place in zip(loop.table_axes, places, strict=True)})
        return values

    def blocks(self, window: Window) -> Array | None:
        """The number of the block in each step; None if an array decides it, or there are too many steps."""
        if self.coordinates is None:
            return None
        total = np.zeros(self.count, np.int64)
        for window_dim, length in zip(window.dims, window.param.ref.shape, strict=True):
            if window_dim.kind not in ("at", "tiled"):
                continue
            place = self._place(window_dim)
            if place is None:
                return None
            most = _blocks_along(window_dim, length)
            total = total * most + np.clip(place // window_dim.size, 0, most - 1)
        return total

    def _place(self, window_dim: WindowDim) -> Array | None:
        total = np.full(self.count, window_dim.position.const, np.int64)
        for term in window_dim.position.terms:
            value = window_dim.operands[term.operand]
            if self._plan.scalars.reads_array(value):
                return None
            number = self._plan.scalars.evaluate_numpy(value, self._indices)
            total = total + term.digit(number.astype(np.int64)) * term.stride
        return total


def _blocks_along(window_dim: WindowDim, length: int) -> int:
    if window_dim.kind == "tiled":
        return tiles(length, window_dim.size)
    return length if window_dim.kind == "at" else 1


def _count(window: Window) -> int:
    pairs = zip(window.dims, window.param.ref.shape, strict=True)
    return prod(_blocks_along(window_dim, length) for window_dim, length in pairs)


# --- pipelines --------------------------------------------------------------------------------------------------------


def check_pipelined_outputs(plan: KernelPlan) -> None:
    """Check that each iteration of a pipelined loop writes the whole block of each of its outputs.

    Raises:
      PlanError: an iteration leaves out elements, for which the pipeline writes stale VMEM to HBM.
    """
    for param in plan.pipelined_outputs:
        writers = {fold: pipeline for fold, pipeline in plan.pipelines.items() if param in pipeline.outputs}
        stores = {fold: [op for op in fold.body.ops if isinstance(op, Store) and op.ref is param] for fold in writers}
        accesses = [op for op in plan.func.walk() if isinstance(op, MemoryOp) and op.ref is param]
        elsewhere = len(accesses) - sum(map(len, stores.values()))
        require(elsewhere == 0, f"{param.name} is in HBM", "stores of pipelined loops alone", f"{elsewhere} others")
        for fold, ops in stores.items():
            _check_whole(plan, fold, param, ops)


def _check_whole(plan: KernelPlan, fold: Fold, param: Value, stores: Sequence[Store]) -> None:
    window = plan.outputs[param].window
    whole = [d for d, window_dim in enumerate(window.dims) if window_dim.kind not in ("at", "tiled")]
    written = np.zeros([param.ref.shape[d] for d in whole], np.bool_)
    for op in stores:
        with source.at(op.loc):
            require(not op.masked, f"a block of {param.name} is written in part", "a store without a mask", "a mask")
            for number, (dim, length) in enumerate(zip(op.access.dims, param.ref.shape, strict=True)):
                interval = position_interval(dim.position, [plan.ranges.get(v) for v in op.positions])
                inside = number in whole or (interval is not None and interval.low >= 0 and interval.high < length)
                got = "any place" if interval is None else f"{interval.low} to {interval.high}"
                require(inside, f"a block of {param.name} is not written", f"places 0 to {length - 1}", got)
            places = [op.access.dims[d] for d in whole]
            constant = all(dim.kind in ("block", "index") and not dim.position.terms for dim in places)
            require(constant, f"a block of {param.name} is written in part", "constant places", "others")
            written[tuple(slice(max(0, d.position.const), d.position.const + d.size) for d in places)] = True
    with source.at(fold.loc):
        got = f"{int(written.sum())} of {written.size} elements"
        require(bool(written.all()), f"an iteration leaves out elements of {param.name}", "the whole block", got)
