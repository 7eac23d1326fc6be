"""Products of few rows by numbers of 4 bits, without a tile in which the two numbers of each byte are neighbours.

    dot(x, joined(a, b))  →  joined(dot(x, a), dot(x, b))          the pairs are columns
    dot(x, joined(a, b))  →  dot(x[even], a) + dot(x[odd], b)      the pairs are contracted

`joined` has elements of a and of b in turn along one dim: a[0], b[0], a[1], b[1], ... Few rows use each element a few
times only, so its way to its place would take longer than its products. Sums of columns stay the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilekern.ir.compute import Bitcast, Convert, Dot, Select
from tilekern.ir.constants import splat_of
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Concatenate, Reshape, Slice, Transpose
from tilekern.ir.types import TileType

_Pair = tuple[Value, Value]


def dot_of_pairs(make: Make, op: Dot, rewriter: Rewriter) -> Value | None:
    """The product in the form of this module; None if the right operand is not joined."""
    left, right = op.operands
    for dim in range(len(right.tile.shape)):
        pair = _pair(make, right, dim, rewriter)
        if pair is None:
            continue

        def product(x: Value, half: Value) -> Value:
            (result,) = rewriter.visit(replace(op, operands=(x, half)))
            return result

        if dim in op.contract[1]:
            at = op.contract[0][op.contract[1].index(dim)]
            return make.of("add", *(product(_every_second(make, left, at, n), pair[n]) for n in (0, 1)))
        if dim in op.free(1):
            place = len(op.batch[0]) + len(op.free(0)) + op.free(1).index(dim)
            return _joined(make, place, *(product(left, half) for half in pair))
    return None


def _pair(make: Make, x: Value, dim: int, rewriter: Rewriter) -> _Pair | None:
    """Tiles (a, b) with x = joined(a, b) along `dim`; None if x is not of this form."""
    op = rewriter.definition(x)
    match op:
        case Reshape():
            joint = rewriter.definition(op.operands[0])
            return _operands(make, joint, dim, rewriter) if _is_joined(joint, op, dim) else None
        case Transpose():
            pair = _pair(make, op.operands[0], op.permutation[dim], rewriter)
            return pair and _both(lambda half: make.transpose(half, op.permutation), pair)
        case Elementwise() | Convert() | Select() | Bitcast():
            return _pair_of_lanes(make, op, dim, rewriter)
        case _:
            return None


def _is_joined(joint: Op | None, op: Reshape, dim: int) -> bool:
    """True if a reshape of a concatenation of two tiles has their elements in turn along `dim`."""
    if not isinstance(joint, Concatenate) or len(joint.operands) != 2 or joint.dim != dim + 1:
        return False
    shape = joint.result.tile.shape
    return shape[dim + 1] == 2 and op.shape == (*shape[:dim], 2 * shape[dim], *shape[dim + 2 :])


def _operands(make: Make, joint: Op | None, dim: int, rewriter: Rewriter) -> _Pair:
    assert joint is not None
    a, b = joint.operands
    shape = (*a.tile.shape[: dim + 1], *a.tile.shape[dim + 2 :])

    def half(x: Value) -> Value:
        """x without its dim of size 1: the tile that got this dim, if there is one, may be a function of bytes."""
        op = rewriter.definition(x)
        return (
            op.operands[0] if isinstance(op, Reshape) and op.operands[0].tile.shape == shape else make.reshape(x, shape)
        )

    return _both(half, (a, b))


def _pair_of_lanes(make: Make, op: Op, dim: int, rewriter: Rewriter) -> _Pair | None:
    """The pair of an op that is computed lane by lane: the op on the pairs of its operands. Splats are in both."""
    sides: list[list[Value]] = [[], []]
    has_pair = False
    for x in op.operands:
        number, pair = splat_of(x, rewriter), None
        if number is None:
            pair = _pair(make, x, dim, rewriter)
            if pair is None:
                return None
            has_pair = True
        shape = x.tile.shape
        half = TileType((*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]), x.tile.dtype)
        for n, side in enumerate(sides):
            side.append(make.number(number, half) if pair is None else pair[n])
    return (make.again(op, *sides[0]), make.again(op, *sides[1])) if has_pair else None


def _both(function: Callable[[Value], Value], pair: _Pair) -> _Pair:
    return function(pair[0]), function(pair[1])


def _joined(make: Make, dim: int, a: Value, b: Value) -> Value:
    """The elements of a and b in turn along `dim`."""
    shape = a.tile.shape
    pair = [make.reshape(x, (*shape[: dim + 1], 1, *shape[dim + 1 :])) for x in (a, b)]
    return make.reshape(make.joined(dim + 1, *pair), (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))


def _every_second(make: Make, x: Value, dim: int, first: int) -> Value:
    """Elements `first`, `first` + 2, ... of x along `dim`."""
    start, stride = ([base] * len(x.tile.shape) for base in (0, 1))
    start[dim], stride[dim] = first, 2
    return make.add(Slice, x, start=tuple(start), stop=x.tile.shape, stride=tuple(stride))
