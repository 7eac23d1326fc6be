"""Ops that move elements and need memory for their results: concatenate, pad, dynamic update, take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilekern.ir.core import Value, cdiv
from tilekern.ir.dynamic import DynamicUpdateSlice, Take
from tilekern.ir.shape import Concatenate, Pad
from tilekern.lower.llvm.element_index import ZERO, Coords, Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import for_each_vector
from tilekern.lower.llvm.ir_values import Reg


def _copy(e: Elements, source: Value, target: Value, shape: tuple[int, ...], to: Callable[[Coords], Coords]) -> None:
    """Copy a range of `shape` of a tile; `to` maps coordinates in the source to coordinates in the target."""

    def body(coords: Coords, lanes: int) -> None:
        e.write(target, e.element(source, coords, lanes), to(coords))

    for_each_vector(e, shape, body)


def concatenate(e: Elements, op: Concatenate) -> None:
    """Copy the parts one after the other."""
    alone = len(op.operands) > 1 and all(x.tile.shape[op.dim] == 1 for x in op.operands)
    if alone and 0 < op.dim == len(op.result.tile.shape) - 1:
        stack(e, op)
        return
    at = 0
    for x in op.operands:

        def to(coords: Coords, at: int = at) -> Coords:
            return tuple(i.shifted(at) if d == op.dim else i for d, i in enumerate(coords))

        _copy(e, x, op.result, x.tile.shape, to)
        at += x.tile.shape[op.dim]


def stack(e: Elements, op: Concatenate) -> None:
    """Interleave parts of size 1 along the last dim, by vectors along the dim before it."""

    def body(coords: Coords, lanes: int) -> None:
        parts = [e.element(x, (*coords, ZERO), lanes) for x in op.operands]
        if not lanes or len(parts) & (len(parts) - 1):
            for n, x in enumerate(parts):
                e.write(op.result, x, (*coords, Index(const=n)))
            return
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [_interleave(e, x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
        e.write(op.result, parts[0], (*coords[:-1], replace(coords[-1], step=0), Index(step=1)))

    for_each_vector(e, op.result.tile.shape[:-1], body)


def _interleave(e: Elements, x: Reg, y: Reg) -> Reg:
    lanes = x.type.lanes
    return e.code.shuffle(x, y, [n + side for n in range(lanes) for side in (0, lanes)])


def pad(e: Elements, op: Pad) -> None:
    """Fill the result with the padding, then copy the elements that negative padding does not cut off."""
    x, fill = op.operands
    for_each_vector(
        e, op.result.tile.shape, lambda coords, lanes: e.write(op.result, e.element(fill, (), lanes), coords)
    )
    begins, ends = list[int](), list[int]()
    amounts = zip(x.tile.shape, op.low, op.interior, op.result.tile.shape, strict=True)
    for n, low, interior, length in amounts:
        begins.append(max(0, cdiv(-low, interior + 1)))
        ends.append(min(n, cdiv(length - low, interior + 1)))
    shape = tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))

    def body(coords: Coords, lanes: int) -> None:
        source = tuple(i.shifted(begin) for i, begin in zip(coords, begins, strict=True))
        target = tuple(
            i.times(interior + 1).shifted(low) for i, low, interior in zip(source, op.low, op.interior, strict=True)
        )
        e.write(op.result, e.element(x, source, lanes), target)

    if x.tile.shape:
        for_each_vector(e, shape, body)
    else:
        e.write(op.result, e.element(x, ()), ())


def update(e: Elements, op: DynamicUpdateSlice) -> None:
    """Copy the tile, then the update over a part of it."""
    x, part, *starts = op.operands
    _copy(e, x, op.result, x.tile.shape, lambda coords: coords)
    room = [n - size for n, size in zip(x.tile.shape, part.tile.shape, strict=True)]
    origin = [e.clamped_index(start, most) for start, most in zip(starts, room, strict=True)]
    _copy(
        e,
        part,
        op.result,
        part.tile.shape,
        lambda coords: tuple(i.plus(o) for i, o in zip(coords, origin, strict=True)),
    )


def take(e: Elements, op: Take) -> None:
    """Gather elements along a dim."""
    x, indices = op.operands
    rank, most = len(indices.tile.shape), x.tile.shape[op.dim] - 1

    def body(coords: Coords, lanes: int) -> None:
        before = coords[: op.dim]
        if op.along:
            where, after = coords, coords[op.dim + 1 :]
        else:
            where, after = coords[op.dim : op.dim + rank], coords[op.dim + rank :]
        code = e.code
        # If all lanes have the same index, their elements are neighbours. Else the lanes are gathered.
        width = lanes if any(i.step for i in where) else 0
        index = code.intrinsic("llvm.smax", e.element(indices, where, width), 0)
        index = code.cast("sext", code.intrinsic("llvm.smin", index, most), "i64")
        if width:
            element = e.gather(x, (*before, Index(), *after), op.dim, index)
        else:
            element = e.element(x, (*before, index_of(index), *after), lanes)
        e.write(op.result, element, coords)

    for_each_vector(e, op.result.tile.shape, body)
