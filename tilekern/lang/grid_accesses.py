"""The elements that programs touch, evaluated program by program, where the grid alone decides that they do.

The grid decides a value if pure ops compute the value from indices of the grid and from constants. It decides that an
access runs if it decides the bounds of each loop, and the region of each switch, around the access. The index of such a
loop is decided, too.
What data decide is left out: it may touch anything, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import product
from math import prod

import numpy as np

from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.touched import Touched

# At most so many lanes, and ops, of all programs together: milliseconds. Four programs are evaluated anyway.
_LANES, _OPS, _LEAST = 1 << 16, 2048, 4


class Accesses:
    """The accesses that the grid alone decides."""

    def __init__(self, func: Func, accesses: Sequence[Load | Store]) -> None:
        self._func, self._accesses = func, frozenset(accesses)
        self._decided: set[Value] = set(func.body.args)
        self._touched: dict[Op, Touched] = {}
        self._needed: set[Op] = set()
        self._decide(func.body)
        self._used = self._need(func.body)

    def of_programs(self, most: int) -> list[dict[Op, Array]]:
        """The flat indices of the elements that each access touches, for at most `most` programs.

        The programs differ in the indices of the grid on which an evaluated access depends.
        """
        if not self._touched:
            return []
        sizes = [
            axis.tiles if arg in self._used else min(axis.tiles, 1)
            for arg, axis in zip(self._func.body.args, self._func.axes, strict=True)
        ]
        count = prod(sizes)
        if not count:
            return []
        first = self._program((0,) * len(sizes))
        most = max(_LEAST, min(most, _LANES // max(first.lanes, 1), _OPS // max(first.ops, 1)))
        if count <= most:
            places = iter(product(*map(range, sizes)))
        else:
            ends = [*range(most // 2), *range(count - most // 2, count)]
            places = iter(np.stack(np.unravel_index(ends, sizes), 1))
        programs = [self._program(place) for place in places]
        return [{op: program.elements(op) for op in self._accesses} for program in programs]

    def _program(self, place: Sequence[int]) -> _Program:
        indices = {arg: np.asarray(n, np.int32) for arg, n in zip(self._func.body.args, place, strict=True)}
        program = _Program(self._touched, self._needed, self._used, indices)
        program.run(self._func.body)
        return program

    # --- ops to run ---

    def _decide(self, block: Block) -> None:
        """Collect the values that the grid decides, and the accesses that surely run at such positions."""
        for op in block.ops:
            if isinstance(op, (Load, Store)):
                few_lanes = prod(op.access.shape) <= _LANES
                if few_lanes and op in self._accesses and self._decided.issuperset(_operands(op)):
                    self._touched[op] = Touched(op, {})
            elif isinstance(op, Fold) and {op.start, op.stop} <= self._decided:
                self._decided.add(op.body.args[0])
                self._decide(op.body)
            elif isinstance(op, Switch) and op.operands[0] in self._decided:
                for region in op.regions:
                    self._decide(region)
            elif op.pure and not op.regions and self._decided.issuperset(op.operands):
                self._decided.update(op.results)

    def _need(self, block: Block) -> set[Value]:
        """The values that the accesses of a block need from outside of it; also collects the ops to run."""
        used = set[Value]()
        for op in reversed(block.ops):
            if isinstance(op, (Load, Store)) and op in self._touched:
                used.update(_operands(op))
            elif isinstance(op, (Fold, Switch)) and any(inner in self._touched for inner in op.walk()):
                used.update(*map(self._need, op.regions), op.operands[:2] if isinstance(op, Fold) else op.operands)
            elif used.isdisjoint(op.results) or not self._decided.issuperset(op.results):
                continue
            else:
                used.update(op.operands)
            self._needed.add(op)
        return used


def _operands(op: Load | Store) -> list[Value]:
    """The values that decide which elements an access touches."""
    return [v for v in (*op.positions, op.mask) if v is not None]


class _Program:
    """What one program touches, up to a number of lanes and of ops.

    Attributes:
      lanes: the number of lanes that the accesses touched.
      ops: the number of ops that ran, and of iterations of loops.
    """

    def __init__(
        self,
        touched: Mapping[Op, Touched],
        needed: Set[Op],
        used: Set[Value],
        indices: dict[Value, Array],
    ) -> None:
        """`touched` are the accesses, `needed` all ops to run, `used` their operands, `indices` the grid's."""
        self._touched, self._needed, self._used, self._values = touched, needed, used, indices
        self._parts: dict[Op, list[Array]] = {}
        self.lanes = self.ops = 0

    def elements(self, op: Op) -> Array:
        """The flat indices of the elements that an access touched."""
        return np.concatenate([np.zeros(0, np.int64), *self._parts.get(op, ())])

    def run(self, block: Block) -> None:
        """Run a block, unless the program has touched enough."""
        for op in block.ops:
            if op not in self._needed:
                continue
            self.ops += 1
            if op in self._touched:
                part = self._touched[op].elements(self._values)[0].reshape(-1)
                self._parts.setdefault(op, []).append(part)
                self.lanes += part.size
            elif isinstance(op, Fold):
                self._fold(op)
            elif isinstance(op, Switch):
                self.run(op.regions[min(max(int(self._values[op.operands[0]]), 0), len(op.regions) - 1)])
            else:
                self._values[op.result] = np.asarray(op.evaluate(*(self._values[v] for v in op.operands)))

    def _fold(self, op: Fold) -> None:
        first, end = op.axis.first_tile(int(self._values[op.start])), op.axis.end_tile(int(self._values[op.stop]))
        index = op.body.args[0]
        for tile in range(first, end if index in self._used else min(end, first + 1)):
            if self.ops >= _OPS // _LEAST or self.lanes >= _LANES // _LEAST:
                return
            self._values[index] = np.asarray(tile, np.int32)
            self.ops += 1
            self.run(op.body)
