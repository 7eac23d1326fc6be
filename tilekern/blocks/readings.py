"""How the loops of a program for CPUs read loaded tiles: how often, for how many rows, and beside which tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Load, MemoryOp, Position
from tilekern.ir.types import TileType


class Shift(NamedTuple):
    """The distance to an earlier access of the same array, by a constant along one dim.

    Attributes:
      dim: the dim.
      elements: the distance, at least 1.
      depth: the number of the innermost loop around the access that moves it along the dim; None if none does.
    """

    dim: int
    elements: int
    depth: int | None


class Readings:
    """How often the steps of a block read a loaded tile.

    A step is one pass over lanes, and stores what later steps use. Cheap values are not stored: each step computes
    them again, and reads the loaded tiles below them again.

    Args:
      block: the block.
      is_stored: True for a value that is stored where it is computed.
      after: the ops whose results exist only after the last element of their operands.
    """

    def __init__(self, block: Block, is_stored: Callable[[Value], bool], after: tuple[type[Op], ...]) -> None:
        self._steps: dict[Value, set[int]] = {}
        self._rows: dict[Value, int] = {}
        self._step: dict[Value, int] = {}
        self._below: dict[Value, frozenset[Value]] = {}  # the loaded tiles that a value is computed from lane by lane
        for op in block.ops:
            here, loads = self._of_values(op.uses())
            ends = isinstance(op, after)
            self._step |= dict.fromkeys(op.results, here + ends)
            if isinstance(op, Load):
                self._below[op.result] = loads | {op.result}
                continue
            for result in () if ends else op.results:
                self._note_rows(result, loads)
            if ends or not op.results or any(map(is_stored, op.results)):
                self._note_step(here, loads)
            else:
                self._below |= dict.fromkeys(op.results, loads)
        self._note_step(*self._of_values(block.results))

    def passes(self, load: Load) -> int:
        """The number of steps that read the tile."""
        return max(len(self._steps.get(load.result, ())), 1)

    def rows_of_use(self, load: Load) -> int:
        """The number of rows for which a step reads each row of the tile: it is broadcast along so many."""
        return self._rows.get(load.result, 1)

    def _of_values(self, values: Iterable[Value]) -> tuple[int, frozenset[Value]]:
        """The step in which an op has all of some values, and the loaded tiles below them."""
        values = list(values)
        step = max((self._step.get(value, 0) for value in values), default=0)
        return step, frozenset[Value]().union(*(self._below.get(value, frozenset()) for value in values))

    def _note_step(self, step: int, loads: Iterable[Value]) -> None:
        for load in loads:
            self._steps.setdefault(load, set()).add(step)

    def _note_rows(self, result: Value, loads: Iterable[Value]) -> None:
        for load in loads:
            self._rows[load] = max(self._rows.get(load, 1), _rows_of(load, result))


def _rows_of(load: Value, result: Value) -> int:
    """How many rows of a result are computed from the same row of a loaded tile."""
    if not isinstance(result.type, TileType):
        return 1
    shape, wide = load.tile.shape, result.tile.shape
    if not shape or not wide or shape[-1] != wide[-1] or shape[-1] <= 1:
        return 1
    return max(1, math.prod(wide[:-1]) // max(math.prod(shape[:-1]), 1))


def shift(op: MemoryOp, earlier: Sequence[MemoryOp], loops: Callable[[Position], Sequence[int]]) -> Shift | None:
    """The smallest distance to an earlier access of the array; None if none is a constant number of rows away.

    Args:
      op: the access.
      earlier: the accesses before it.
      loops: returns the numbers of the loops that a position depends on.
    """
    shifts = [s for access in earlier if access.ref is op.ref and (s := _shift(op, access, loops)) is not None]
    return min(shifts, key=lambda s: s.elements, default=None)


def _shift(op: MemoryOp, earlier: MemoryOp, loops: Callable[[Position], Sequence[int]]) -> Shift | None:
    dims, earlier_dims = op.access.dims, earlier.access.dims
    places = [[(d.kind, d.size, terms(x, d.position)) for d in x.access.dims] for x in (op, earlier)]
    if places[0] != places[1]:
        return None
    distances = [abs(a.position.const - b.position.const) for a, b in zip(dims, earlier_dims, strict=True)]
    moved = [dim for dim, distance in enumerate(distances) if distance]
    if len(moved) != 1:
        return None
    return Shift(moved[0], distances[moved[0]], max(loops(dims[moved[0]].position), default=None))


def row_parts(func: Func) -> set[Op]:
    """The accesses that have a part of the last dim, where the accesses of the same place have all of it together.

    `x[i, :half]` and `x[i, half:]` read whole rows.
    """
    groups: dict[object, list[tuple[MemoryOp, range]]] = {}
    for op in func.walk():
        if isinstance(op, MemoryOp) and op.access.dims and not op.access.dims[-1].position.terms:
            *outer, last = op.access.dims
            place = [(d.kind, d.size, d.position.const, terms(op, d.position)) for d in outer]
            part = range(last.position.const, last.position.const + last.size)
            groups.setdefault((op.ref, type(op), tuple(place)), []).append((op, part))
    whole = (group for group in groups.values() if _cover(group[0][0].extents[-1], [part for _, part in group]))
    return {op for group in whole if len(group) > 1 for op, _ in group}


def terms(op: MemoryOp, position: Position) -> frozenset[object]:
    """The terms of a position, with the values of their operands."""
    return frozenset((op.positions[t.operand], t.stride, t.div, t.mod) for t in position.terms)


def _cover(extent: int, parts: Sequence[range]) -> bool:
    """True if parts cover all elements of a dim."""
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > end:
            break
        end = max(end, part.stop)
    return end >= extent
