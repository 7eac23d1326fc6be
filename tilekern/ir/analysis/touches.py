"""The places of arrays that one program accesses, step by step, as far as its place in the grid decides them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.memory import Dim, MemoryOp
from tilekern.ir.records import record

LONGEST = 32
"""The most tiles of a fold that are followed one by one; the index of a longer fold counts as unknown."""

_SMALL = 1024  # elements: larger tiles are not computed


@record
class Touch:
    """One access of a program in one step of its loops.

    Attributes:
      op: the access.
      first: the first element along each dim of the array, which may be negative; None where more than the place in the
        grid decides: values of arrays, or a long loop.
    """

    op: MemoryOp
    first: tuple[int | None, ...]

    @property
    def place(self) -> tuple[tuple[int, int], ...]:
        """The first element and the number of elements along each dim: the whole dim where the first is unknown."""
        dims = zip(self.op.access.dims, self.first, self.op.extents, strict=True)
        return tuple((0, extent) if first is None else (first, dim.size) for dim, first, extent in dims)


def touches(func: Func, program: tuple[int, ...]) -> Iterator[Touch]:
    """The accesses of the program with these tile indices, in the order in which it runs them.

    Small values that follow from the indices alone are computed, so bounds of loops that depend on the place in the
    grid are exact. Of a branch by data all regions are followed, and the body of a while loop once.
    """
    indices = [np.asarray(index, np.int32) for index in program]
    yield from _block(func.body, dict(zip(func.body.args, indices, strict=True)))


def _block(block: Block, values: dict[Value, Array]) -> Iterator[Touch]:
    for op in block.ops:
        if isinstance(op, MemoryOp):
            dims = op.access.dims
            yield Touch(op, tuple(_first(op, dim, values) for dim in dims))
        elif isinstance(op, Fold):
            yield from _fold(op, values)
        elif isinstance(op, Switch) and op.operands[0] in values:
            yield from _block(op.regions[min(max(int(values[op.operands[0]]), 0), len(op.regions) - 1)], values)
        elif op.regions:
            for region in op.regions:
                yield from _block(region, values)
        elif _computable(op, values):
            values[op.result] = np.asarray(op.evaluate(*(values[v] for v in op.operands)))


def _computable(op: Op, values: dict[Value, Array]) -> bool:
    return op.pure and all(v in values for v in op.operands) and op.result.tile.size <= _SMALL


def _first(op: MemoryOp, dim: Dim, values: dict[Value, Array]) -> int | None:
    operands = [op.positions[term.operand] for term in dim.position.terms]
    if dim.kind not in ("block", "index") or any(value not in values for value in operands):
        return None
    terms = zip(dim.position.terms, operands, strict=True)
    return dim.position.const + sum(term.stride * int(term.digit(int(values[value]))) for term, value in terms)


def _fold(fold: Fold, values: dict[Value, Array]) -> Iterator[Touch]:
    axis = fold.axis
    start, stop = (int(values[v]) if v in values else other for v, other in ((fold.start, 0), (fold.stop, axis.extent)))
    tiles = range(axis.first_tile(start), axis.end_tile(stop))
    if len(tiles) > LONGEST:
        yield from _block(fold.body, dict(values))
        return
    for tile in reversed(tiles) if fold.reverse else tiles:
        yield from _block(fold.body, values | {fold.body.args[0]: np.asarray(tile, np.int32)})
