"""Cut grid axes into the digits of their indices that accesses take.

Needs: a canonical Func. Gives: an access takes digits of a grid index only where they do not divide the grid.

    grid n of 12; load x[n // 4, n % 4]           → grid n0 of 3, n1 of 4; n = 4 * n0 + n1; load x[n0, n1]

The programs are the same, in the same row-major order. An axis with a ragged last tile stays, as backends treat its
full tiles apart; so do all axes of a grid that runs in groups of tiles. `canonicalize` takes the sum for n into the
accesses.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tilekern.ir.core import Axis, Block, Func, Value, index_value
from tilekern.ir.make import Make
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Rewriter


def split_axes(func: Func) -> Func:
    """Apply the rewrite above."""
    all_radices = [_radices(func, index, axis) for index, axis in zip(func.body.args, func.axes, strict=True)]
    if all(len(radices) == 1 for radices in all_radices) or any(axis.group for axis in func.axes):
        return func
    axes: list[Axis] = []
    args: list[Value] = []
    rewriter = Rewriter(lambda op, rewriter: None)

    def body(*_: Value) -> tuple[Value, ...]:
        for index, axis, radices in zip(func.body.args, func.axes, all_radices, strict=True):
            digits = _digits(axis, radices)
            axes.extend(digits)
            if len(digits) == 1:
                args.append(index)
                continue
            places = [index_value(digit.name) for digit in digits]
            args.extend(places)
            rewriter.replace(index, _number(places, radices, Make(rewriter)))
        return rewriter.inline(func.body)

    ops = rewriter.block((), body).ops
    return replace(func, axes=tuple(axes), body=Block(tuple(args), ops, ()))


def _radices(func: Func, index: Value, axis: Axis) -> list[int]:
    """The strides of the digits, largest first, each a multiple of the next; [1] if the axis is one digit."""
    if axis.full_tiles != axis.tiles:
        return [1]
    borders: set[int] = set()
    for op in func.walk():
        if isinstance(op, MemoryOp):
            terms = (t for d in op.access.dims for t in d.position.terms if op.positions[t.operand] is index)
            borders |= {border for t in terms for border in (t.div, t.div * t.mod)}
    radices = [1]
    for border in sorted(borders):
        if radices[-1] < border < axis.tiles and axis.tiles % border == border % radices[-1] == 0:
            radices.append(border)
    return radices[::-1]


def _digits(axis: Axis, radices: list[int]) -> list[Axis]:
    if len(radices) == 1:
        return [axis]
    sizes = [high // low for high, low in pairwise([axis.tiles, *radices])]
    return [replace(axis, name=f"{axis.name}{n}", extent=size, block=1) for n, size in enumerate(sizes)]


def _number(digits: list[Value], radices: list[int], make: Make) -> Value:
    """The number with these digits."""
    total: Value | None = None
    for digit, radix in zip(digits, radices, strict=True):
        place = make.of("mul", digit, radix)
        total = place if total is None else make.of("add", total, place)
    assert total is not None
    return total
