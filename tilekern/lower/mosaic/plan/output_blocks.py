"""The output block that each step of the grid writes.

Pallas keeps a block in VMEM while consecutive steps write it, and writes it to HBM before a step with another block.
A block that returned later would start with stale VMEM. So the steps that write one block must be consecutive. Two
cores may share the steps of an axis only if no block is written by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tilekern.ir.core import Array, Func, Value
from tilekern.lower.mosaic.calibration import MAX_ENUMERATED_STEPS
from tilekern.lower.mosaic.plan.grid_loops import GridLoop
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Window, WindowDim, axes_of, tiles


class OutputBlocks:
    """The blocks that the steps of a grid write, found by enumerating the steps.

    Args:
      func: the Func.
      grid_loop: the loop that is the last axis of the grid, or None.
      order: the axes of the Func, by number, in the order of the grid.
      scalars: the scalars that index maps can compute.
      outputs: the window of each output.
    """

    def __init__(
        self,
        func: Func,
        grid_loop: GridLoop | None,
        order: Sequence[int],
        scalars: Scalars,
        outputs: Mapping[Value, Window],
    ) -> None:
        self._func, self._grid_loop, self._order, self._scalars = func, grid_loop, order, scalars
        self._outputs = outputs
        self._args = func.body.args
        self._steps = self._all_steps()

    def is_consecutive(self, param: Value) -> bool:
        """True if the steps that write a block are consecutive, for each block of an output.

        An output with initial values also needs a first step for each block: the step in which all axes that do not
        move the block are at 0. There the kernel initialises the block.
        """
        blocks = self._blocks(param)
        if blocks is None:
            return False
        if not len(blocks):
            return True
        count = len(np.unique(blocks))
        if param.ref.role != "out":
            still = [n for n, moves in enumerate(self.moving_axes(self._outputs[param])) if not moves]
            if np.count_nonzero((self._coordinates[still] == 0).all(axis=0)) != count:
                return False
        return len(np.flatnonzero(blocks[1:] != blocks[:-1])) + 1 == count

    def covers_array(self, param: Value) -> bool:
        """True if each block of an output is written by some step."""
        blocks = self._blocks(param)
        return blocks is not None and len(np.unique(blocks)) == self._count(param)

    def moving_axes(self, window: Window) -> tuple[bool, ...]:
        """One flag for each axis of the grid: True if the block of a window changes along the axis."""
        used = axes_of(window, self._scalars)
        own = [self._args[n] in used for n in self._order]
        if self._grid_loop is None:
            return tuple(own)
        inner = {self._grid_loop.index, *(self._args[n] for n in self._grid_loop.table_axes)}
        return (*own, bool(inner & used))

    def independent_axes(self) -> tuple[bool, ...]:
        """One flag for each axis of the grid: True if no two of its steps write the same block."""
        count = len(self._order) + (self._grid_loop is not None)
        independent = [self._grid_loop is None or n < len(self._order) for n in range(count)]
        for param in self._outputs:
            blocks = self._blocks(param)
            for n in range(count):
                if blocks is None:
                    independent[n] = False
                elif independent[n] and len(blocks):
                    pairs = np.stack([blocks, self._coordinates[n]])
                    independent[n] = np.unique(pairs, axis=1).shape[1] == len(np.unique(blocks))
        return tuple(independent)

    def _count(self, param: Value) -> int:
        total = 1
        for window_dim, length in zip(self._outputs[param].dims, param.ref.shape, strict=True):
            total *= (
                length
                if window_dim.kind == "at"
                else tiles(length, window_dim.size)
                if window_dim.kind == "tiled"
                else 1
            )
        return total

    def _all_steps(self) -> dict[Value, Array] | None:
        """The values of each index in all steps, in the order of the grid; None if there are too many steps."""
        shape = [self._func.grid[n] for n in self._order]
        grid_loop = self._grid_loop
        if grid_loop is not None:
            shape.append(grid_loop.steps)
        if prod(shape) > MAX_ENUMERATED_STEPS:
            return None
        grid = np.indices(shape, np.int32).reshape(len(shape), prod(shape))
        self._coordinates = grid
        places = {self._args[n]: grid[k] for k, n in enumerate(self._order)}
        if grid_loop is not None:
            step = grid[-1]
            if grid_loop.table is None:
                places[grid_loop.index] = grid_loop.steps - 1 - step if grid_loop.reverse else step
            else:
                places[grid_loop.index] = grid_loop.table[0][step]
                places.update({self._args[n]: grid_loop.table[2 + k][step] for k, n in enumerate(grid_loop.table_axes)})
        return places

    def _blocks(self, param: Value) -> Array | None:
        """The number of the block that each step writes; None if it depends on an array."""
        if self._steps is None:
            return None
        first = next(iter(self._steps.values()), np.zeros(1, np.int32))
        total = np.zeros(first.shape, np.int64)
        for window_dim, length in zip(self._outputs[param].dims, param.ref.shape, strict=True):
            if window_dim.kind not in ("at", "tiled"):
                continue
            place = self._place(window_dim)
            if place is None:
                return None
            count = length if window_dim.kind == "at" else tiles(length, window_dim.size)
            total = total * count + np.clip(place // window_dim.size, 0, count - 1)
        return total

    def _place(self, window_dim: WindowDim) -> Array | None:
        total = np.asarray(window_dim.position.const, np.int64)
        for term in window_dim.position.terms:
            value = window_dim.operands[term.operand]
            if self._steps is None or self._scalars.reads_array(value):
                return None
            number = self._scalars.evaluate_numpy(value, self._steps)
            total = total + term.digit(number.astype(np.int64)) * term.stride
        return total
