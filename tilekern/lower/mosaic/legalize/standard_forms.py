"""Bring reshapes, and ops on tiles of rank 1, to the forms that Mosaic and the emitter take.

Needs: a Func whose other ops are legal. Gives: a Func in which

    tiles of rank 1   are loaded, stored, carried, computed elementwise, broadcast, results of reductions of rank 2, and
                      reshaped from and to [1, n] and [n, 1]; all other ops on them are rewritten as ops of rank 2
    reshapes          keep the last dim, or have multiples of 128 there on both sides; or are of one element or vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from tilekern.ir.compute import Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Concatenate, Reshape, Slice, Transpose
from tilekern.lower.mosaic.legalize.casts import cast, wide
from tilekern.lower.mosaic.legalize.movement import LANES

_PIECES = 32
"""The most pieces into which a reshape cuts the last dim; beyond that, a reshape by way of one column is shorter."""

Shape = tuple[int, ...]


def standard_forms(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Reshape():
            return [reshape(make, op.operands[0], op.shape)]
        case Transpose() if len(op.permutation) <= 1:
            return [op.operands[0]]
        case Slice() if len(op.start) == 1:
            return [_vector(make, make.part(_row(make, op.operands[0]), 1, op.start[0], op.stop[0]))]
        case Concatenate() if len(op.result.tile.shape) == 1:
            return [_vector(make, make.joined(1, *(_row(make, x) for x in op.operands)))]
        case Broadcast() if len(op.shape) == 1 and op.dims:
            return [_vector(make, make.broadcast(_row(make, op.operands[0]), (1, *op.shape), (0, 1)))]
        case Reduce() if len(op.operands[0].tile.shape) == 1:
            return [make.add(Reduce, _row(make, op.operands[0]), monoid=op.monoid, dims=(0, 1))]
        case _:
            return None


def _row(make: Make, x: Value) -> Value:
    return make.reshape(x, (1, *x.tile.shape))


def _vector(make: Make, row: Value) -> Value:
    return make.reshape(row, (row.tile.size,))


def reshape(make: Make, x: Value, shape: Shape) -> Value:
    """A reshape in steps that are legal."""
    before = x.tile.shape
    if before == shape:
        return x
    if before == ():
        return make.broadcast(x, shape, ())
    if len(before) == 1:
        size = before[0]
        column = shape[-1:] == (1,) and size > 1
        return reshape(make, make.reshape(x, (size, 1) if column else (1, size)), shape)
    if shape == ():
        return make.reshape(reshape(make, x, (1, 1)), ())
    if len(shape) == 1:
        size = shape[0]
        return make.reshape(x if before == (size, 1) else reshape(make, x, (1, size)), shape)
    if is_native(before, shape):
        return make.reshape(x, shape)
    number = wide(make, x)
    return cast(make, _through_pieces(make, number, shape), x.tile.dtype)


def is_native(before: Shape, after: Shape) -> bool:
    """True if Mosaic has the reshape between two shapes of rank 2 and more."""
    last = before[-1], after[-1]
    return last[0] == last[1] or all(n % LANES == 0 for n in last)


def _through_pieces(make: Make, x: Value, shape: Shape) -> Value:
    """Cut the last dim into pieces whose size divides it in both shapes, stack them as rows, and join the rows anew."""
    size, before, after = prod(shape), x.tile.shape[-1], shape[-1]
    piece = gcd(before, after)
    if 1 in (before, after) or before // piece + after // piece > _PIECES:
        return make.reshape(_from_column(make, _to_column(make, x), after), shape)
    if before != piece:
        lines = make.reshape(x, (size // before, before))
        parts = [make.part(lines, 1, n, n + piece) for n in range(0, before, piece)]
        x = make.joined(1, *(make.reshape(part, (size // before, 1, piece)) for part in parts))
    if after != piece:
        lines = make.reshape(x, (size // after, after // piece, piece))
        parts = [make.part(lines, 1, n, n + 1) for n in range(after // piece)]
        x = make.joined(1, *(make.reshape(part, (size // after, piece)) for part in parts))
    return make.reshape(x, shape)


def _to_column(make: Make, x: Value) -> Value:
    """All elements as a column [n, 1]."""
    lanes = x.tile.shape[-1]
    rows = x.tile.size // lanes
    if lanes == 1:
        return make.reshape(x, (rows, 1))
    if rows == 1:
        return make.transpose(make.reshape(x, (1, lanes)), (1, 0))
    turned = make.transpose(make.reshape(x, (rows, 1, lanes)), (0, 2, 1))
    return make.reshape(turned, (rows * lanes, 1))


def _from_column(make: Make, x: Value, lanes: int) -> Value:
    """A column [n, 1] as rows of so many lanes."""
    rows = x.tile.size // lanes
    if lanes == 1:
        return x
    if rows == 1:
        return make.transpose(x, (1, 0))
    turned = make.transpose(make.reshape(x, (rows, lanes, 1)), (0, 2, 1))
    return make.reshape(turned, (rows, lanes))
