"""Which block of an output each step of the grid writes.

Pallas keeps a block in VMEM while consecutive steps write it, and writes it to HBM when a step with another one comes.
A block that comes back later would start with what VMEM happens to hold. So all steps that write a block must be in a
row; and programs may run on two cores at once only where no block is written by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilekern.ir.core import Array, Func, Value
from tilekern.lower.mosaic.plan.grid_loops import Serial
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Role, Window, axes_of, tiles

_MOST_STEPS = 1 << 20  # looked at one by one


class Visits:
    """The steps of a grid and the blocks that they write.

    Args:
      func: the Func.
      serial: the loop in the grid.
      order: the axes of the grid.
      scalars: of the Func.
      outputs: the windows.
    """

    def __init__(
        self,
        func: Func,
        serial: Serial | None,
        order: Sequence[int],
        scalars: Scalars,
        outputs: Mapping[Value, Window],
    ) -> None:
        self._func, self._serial, self._order, self._scalars = func, serial, order, scalars
        self._outputs = outputs
        self._args = func.body.args
        self._steps = self._all_steps()

    def in_a_row(self, param: Value) -> bool:
        """Whether all steps that write a block of an output are consecutive."""
        blocks = self._blocks(param)
        if blocks is None:
            return False
        if not len(blocks):
            return True
        count = len(np.unique(blocks))
        if param.ref.role != "out":
            # A block starts to be written where all axes that it does not depend on are at their first place.
            still = [n for n, changes in enumerate(self.changes(self._outputs[param])) if not changes]
            if np.count_nonzero((self._coordinates[still] == 0).all(axis=0)) != count:
                return False
        return len(np.flatnonzero(blocks[1:] != blocks[:-1])) + 1 == count

    def covers(self, param: Value) -> bool:
        """Whether every block of an output is written by some step."""
        blocks = self._blocks(param)
        return blocks is not None and len(np.unique(blocks)) == self._count(param)

    def changes(self, window: Window) -> tuple[bool, ...]:
        """For each axis of the grid, whether the block of a window depends on it."""
        used = axes_of(window, self._scalars)
        own = [self._args[n] in used for n in self._order]
        if self._serial is None:
            return tuple(own)
        inner = {self._serial.index, *(self._args[n] for n in self._serial.pairs)}
        return (*own, bool(inner & used))

    def separate(self) -> tuple[bool, ...]:
        """For each axis of the grid, whether steps at different places along it never write one block."""
        count = len(self._order) + (self._serial is not None)
        found = [self._serial is None or n < len(self._order) for n in range(count)]
        for param in self._outputs:
            blocks = self._blocks(param)
            for n in range(count):
                if blocks is None:
                    found[n] = False
                elif found[n] and len(blocks):
                    pairs = np.stack([blocks, self._coordinates[n]])
                    found[n] = np.unique(pairs, axis=1).shape[1] == len(np.unique(blocks))
        return tuple(found)

    def _count(self, param: Value) -> int:
        total = 1
        for role, length in zip(self._outputs[param].roles, param.ref.shape, strict=True):
            total *= length if role.kind == "at" else tiles(length, role.size) if role.kind == "tiled" else 1
        return total

    def _all_steps(self) -> dict[Value, Array] | None:
        """The value of each index in each step, in order; None if there are too many."""
        shape = [self._func.grid[n] for n in self._order]
        serial = self._serial
        if serial is not None:
            shape.append(serial.steps)
        if np.prod(shape, dtype=np.float64) > _MOST_STEPS:
            return None
        grid = np.indices(shape, np.int32).reshape(len(shape), int(np.prod(shape)))
        self._coordinates = grid
        found = {self._args[n]: grid[k] for k, n in enumerate(self._order)}
        if serial is not None:
            step = grid[-1]
            if serial.table is None:
                found[serial.index] = serial.steps - 1 - step if serial.reverse else step
            else:
                found[serial.index] = serial.table[0][step]
                found.update({self._args[n]: serial.table[2 + k][step] for k, n in enumerate(serial.pairs)})
        return found

    def _blocks(self, param: Value) -> Array | None:
        """The number of the block that each step writes; None if that is not known beforehand."""
        if self._steps is None:
            return None
        first = next(iter(self._steps.values()), np.zeros(1, np.int32))
        total = np.zeros(first.shape, np.int64)
        for role, length in zip(self._outputs[param].roles, param.ref.shape, strict=True):
            if role.kind not in ("at", "tiled"):
                continue
            place = self._place(role)
            if place is None:
                return None
            count = length if role.kind == "at" else tiles(length, role.size)
            total = total * count + np.clip(place // role.size, 0, count - 1)
        return total

    def _place(self, role: Role) -> Array | None:
        total = np.asarray(role.position.const, np.int64)
        for term in role.position.terms:
            value = role.operands[term.operand]
            if self._steps is None or self._scalars.reads(value):
                return None
            number = self._scalars.beforehand(value, self._steps)
            total = total + term.digit(number.astype(np.int64)) * term.stride
        return total
