"""Tiles that are put together: joined, padded, updated, or picked element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilekern.ir.core import Value, cdiv
from tilekern.ir.dynamic import DynamicUpdateSlice, Take
from tilekern.ir.shape import Concatenate, Pad
from tilekern.lower.llvm.element_index import ZERO, Index, Place
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import cover
from tilekern.lower.llvm.ir_builder import Reg


def _copy(e: Elements, source: Value, target: Value, shape: tuple[int, ...], to: Callable[[Place], Place]) -> None:
    """The elements of a tile in a range of `shape`, each to its place in another one."""

    def body(place: Place, lanes: int) -> None:
        e.put(target, e.at(source, place, lanes), to(place))

    cover(e, shape, body)


def concatenate(e: Elements, op: Concatenate) -> None:
    """One part behind the other."""
    alone = len(op.operands) > 1 and all(x.tile.shape[op.dim] == 1 for x in op.operands)
    if alone and 0 < op.dim == len(op.result.tile.shape) - 1:
        stack(e, op)
        return
    at = 0
    for x in op.operands:

        def to(place: Place, at: int = at) -> Place:
            return tuple(i.shifted(at) if d == op.dim else i for d, i in enumerate(place))

        _copy(e, x, op.result, x.tile.shape, to)
        at += x.tile.shape[op.dim]


def stack(e: Elements, op: Concatenate) -> None:
    """Parts of one element along the last dim each: vectors along the dim before it, whose lanes take turns."""

    def body(place: Place, lanes: int) -> None:
        parts = [e.at(x, (*place, ZERO), lanes) for x in op.operands]
        if not lanes or len(parts) & (len(parts) - 1):
            for n, x in enumerate(parts):
                e.put(op.result, x, (*place, Index(const=n)))
            return
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [_by_turns(e, x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
        e.put(op.result, parts[0], (*place[:-1], replace(place[-1], step=0), Index(step=1)))

    cover(e, op.result.tile.shape[:-1], body)


def _by_turns(e: Elements, x: Reg, y: Reg) -> Reg:
    lanes = x.type.lanes
    return e.code.shuffle(x, y, [n + side for n in range(lanes) for side in (0, lanes)])


def pad(e: Elements, op: Pad) -> None:
    """The padding everywhere, then the elements that are not cut off."""
    x, fill = op.operands
    cover(e, op.result.tile.shape, lambda place, lanes: e.put(op.result, e.at(fill, (), lanes), place))
    begins, ends = list[int](), list[int]()
    amounts = zip(x.tile.shape, op.low, op.interior, op.result.tile.shape, strict=True)
    for n, low, interior, length in amounts:
        begins.append(max(0, cdiv(-low, interior + 1)))
        ends.append(min(n, cdiv(length - low, interior + 1)))
    shape = tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))

    def body(place: Place, lanes: int) -> None:
        source = tuple(i.shifted(begin) for i, begin in zip(place, begins, strict=True))
        target = tuple(
            i.times(interior + 1).shifted(low) for i, low, interior in zip(source, op.low, op.interior, strict=True)
        )
        e.put(op.result, e.at(x, source, lanes), target)

    if x.tile.shape:
        cover(e, shape, body)
    else:
        e.put(op.result, e.at(x, ()), ())


def update(e: Elements, op: DynamicUpdateSlice) -> None:
    """All of the tile, then what replaces a part of it."""
    x, part, *starts = op.operands
    _copy(e, x, op.result, x.tile.shape, lambda place: place)
    room = [n - size for n, size in zip(x.tile.shape, part.tile.shape, strict=True)]
    origin = [e.clamped(start, most) for start, most in zip(starts, room, strict=True)]
    _copy(
        e, part, op.result, part.tile.shape, lambda place: tuple(i.plus(o) for i, o in zip(place, origin, strict=True))
    )


def take(e: Elements, op: Take) -> None:
    """Elements at computed places along a dim."""
    x, indices = op.operands
    rank, most = len(indices.tile.shape), x.tile.shape[op.dim] - 1

    def body(place: Place, lanes: int) -> None:
        before = place[: op.dim]
        if op.along:
            where, behind = place, place[op.dim + 1 :]
        else:
            where, behind = place[op.dim : op.dim + rank], place[op.dim + rank :]
        code = e.code
        # Of one index for all lanes the elements are neighbours, else each lane has its own.
        width = lanes if any(i.step for i in where) else 0
        found = code.intrinsic("llvm.smax", e.at(indices, where, width), 0)
        found = code.cast("sext", code.intrinsic("llvm.smin", found, most), "i64")
        if width:
            element = e.gather(x, (*before, Index(), *behind), op.dim, found)
        else:
            element = e.at(x, (*before, index_of(found), *behind), lanes)
        e.put(op.result, element, place)

    cover(e, op.result.tile.shape, body)
