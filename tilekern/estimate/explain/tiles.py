"""The tiles that one program of the grid reads and writes, for a picture."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.estimate.explain.explanation import TilePicture
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Dim, Load, MemoryOp


def tiles(func: Func) -> tuple[TilePicture, ...]:
    """The tile of each access, for the program in the middle of the grid; accesses of the same tile count once."""
    indices = {index: axis.tiles // 2 for index, axis in zip(func.body.args, func.axes, strict=True)}
    accesses = (op for op in func.walk() if isinstance(op, MemoryOp) and op.extents)
    return tuple(dict.fromkeys(_tile(op, indices) for op in accesses))


def _tile(op: MemoryOp, indices: Mapping[Value, int]) -> TilePicture:
    places = [_place(op, dim, length, indices) for dim, length in zip(op.access.dims, op.extents, strict=True)]
    first, size = zip(*places, strict=True)
    return TilePicture(op.ref.name, op.extents, first, size, not isinstance(op, Load))


def _place(op: MemoryOp, dim: Dim, length: int, indices: Mapping[Value, int]) -> tuple[int, int]:
    """(first element, count) of a tile along a dim, cut at the end of the array.

    (0, length) if more than the indices of the grid decides the place, for instance the index of a fold.
    """
    operands = [op.positions[term.operand] for term in dim.position.terms]
    if dim.kind not in ("block", "index") or any(value not in indices for value in operands):
        return 0, length
    terms = zip(dim.position.terms, operands, strict=True)
    first = dim.position.const + sum(term.stride * term.digit(indices[value]) for term, value in terms)
    first = min(max(first, 0), length)
    return first, min(dim.size, length - first)
