"""Turns of products that read the same data, such as the products with the two halves of bytes: each prefetches a part.

Memory is then busy while each of the products computes, and no line is prefetched twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tilekern.ir.compute import Bitcast, Convert, Dot, Select
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import TileType


def turns_of_dots(func: Func, definition: Mapping[Value, Op]) -> dict[Op, tuple[int, int]]:
    """(turn, turns) of each dot, counted in the order of the ops: (0, 1) if a dot shares no data.

    Dots share data if they have the same dims, and their right operands are computed lane by lane from the same tiles.
    """
    groups: dict[Hashable, list[Dot]] = {}
    for op in func.walk():
        if isinstance(op, Dot):
            shapes = tuple(x.tile.shape for x in op.operands)
            groups.setdefault((_sources(op.operands[1], definition), shapes, op.contract, op.batch), []).append(op)
    return {dot: (turn, len(dots)) for dots in groups.values() for turn, dot in enumerate(dots)}


def _sources(value: Value, definition: Mapping[Value, Op]) -> frozenset[Value]:
    """The tiles from which a tile is computed lane by lane."""
    sources, seen, pending = set[Value](), set[Value](), [value]
    while pending:
        x = pending.pop()
        if x in seen or not isinstance(x.type, TileType) or not x.tile.shape:
            continue
        seen.add(x)
        op = definition.get(x)
        if isinstance(op, (Elementwise, Convert, Select, Bitcast)):
            pending += op.operands
        elif op is None or op.operands:  # a constant is no data
            sources.add(x)
    return frozenset(sources)
