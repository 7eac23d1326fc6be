"""The loop nest of a group: vectors along the last dim, the rest of it in smaller and smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tilekern.ir.compute import Monoid, Reduce, combining, identity, on_bools
from tilekern.ir.types import DType, kind_of
from tilekern.lower.llvm.element_index import Index, Place
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute
from tilekern.lower.llvm.ir_builder import Code, Reg
from tilekern.lower.llvm.llvm_types import known
from tilekern.lower.llvm.plan.steps import Group

# How many vectors of a long row are reduced side by side.
_SIDE = 4


def emit(e: Elements, group: Group) -> None:
    """Emit the loop nest."""
    if not _in_fours(e, group):
        over(e, group.space[:-1], lambda place: _row(e, group, place))
        return

    def fours(outer: Place) -> None:
        def body(i: Reg) -> None:
            with e.scope():
                _four_rows(e, group, outer, index_of(i))

        e.code.loop(0, group.space[-2], 4, body)

    over(e, group.space[:-2], fours)


def _in_fours(e: Elements, group: Group) -> bool:
    """Whether rows are reduced four at once: then their totals are found together, in a few shuffles."""
    if not group.reduces or len(group.space) < 2:
        return False
    return group.space[-2] % 4 == 0 and group.space[-1] > 0 and group.space[-1] % e.code.module.machine.lanes == 0


def _four_rows(e: Elements, group: Group, outer: Place, first: Index) -> None:
    """All that four rows of the last dim need."""
    code, lanes, reduces = e.code, e.code.module.machine.lanes, group.reduces
    name = code.fresh("i")
    rows = [(*outer, first.shifted(n)) for n in range(4)]
    for row in rows:
        e.ahead(group.sources, row, f"%{name}")
    starts = [known(_identity(op), op.result.tile.dtype, lanes) for op in reduces] * 4

    def body(i: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            found = [x for row in rows for x in _vector(e, group, (*row, index_of(i, 1)), lanes)]
            return [combine(code, op, t, x) for op, t, x in zip(reduces * 4, totals, found, strict=True)]

    many = code.loop(0, group.space[-1], lanes, body, *starts, index=name)
    for n, op in enumerate(reduces):
        e.put(op.result, _four_in_one(code, op, many[n :: len(reduces)]), (*outer, Index(first.terms, first.const, 1)))


def _four_in_one(code: Code, op: Reduce, rows: list[Reg]) -> Reg:
    """The totals of four vectors, as one vector of four lanes."""
    lanes, parts = rows[0].type.lanes, 1  # each vector has so many parts, one for a row
    while len(rows) > 1:
        size = lanes // parts
        low = [p * size + n for p in range(2 * parts) for n in range(size // 2)]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [_halves(code, op, a, b, low, size // 2) for a, b in pairs]
        parts *= 2
    (x,) = rows
    while x.type.lanes > parts:
        size = x.type.lanes // parts
        low = [p * size + n for p in range(parts) for n in range(size // 2)]
        x = _halves(code, op, x, x, low, size // 2)
    return x


def _halves(code: Code, op: Reduce, a: Reg, b: Reg, low: list[int], size: int) -> Reg:
    """The lanes `low` of two vectors, each with the lane `size` further on."""
    return combine(code, op, code.shuffle(a, b, low), code.shuffle(a, b, [n + size for n in low]))


def over(e: Elements, shape: tuple[int, ...], body: Callable[[Place], None], place: Place = ()) -> None:
    """One loop for each dim, around `body(place)`."""
    if not shape:
        body(place)
        return

    def inner(i: Reg) -> None:
        with e.scope():
            over(e, shape[1:], body, (*place, index_of(i)))

    e.code.loop(0, shape[0], 1, inner)


def pieces(size: int, lanes: int) -> Iterator[tuple[int, int]]:
    """How to cover what is left of a dim behind the last whole vector: (from where on, so many lanes; 0 for one)."""
    at = size // lanes * lanes
    while at < size:
        lanes //= 2
        if at + lanes <= size:
            yield at, lanes if lanes > 1 else 0
            at += lanes


def vectors(e: Elements, size: int, body: Callable[..., list[Reg]], *inits: Reg, name: str = "") -> list[Reg]:
    """`body(index, lanes, *values)` for all whole vectors along a dim, and the last values."""
    lanes = e.code.module.machine.lanes

    def inner(i: Reg, *values: Reg) -> list[Reg]:
        with e.scope():
            return body(index_of(i, 1), lanes, *values)

    return e.code.loop(0, size // lanes * lanes, lanes, inner, *inits, index=name)


def cover(e: Elements, shape: tuple[int, ...], body: Callable[[Place, int], None], scalars: bool = False) -> None:
    """`body(place, lanes)` for every vector of a space along its last dim, and for what is left of it.

    If `scalars`, for every element instead.
    """
    if scalars or not shape:
        over(e, shape, lambda place: body(place, 0))
        return

    def row(outer: Place) -> None:
        def inner(index: Index, lanes: int) -> list[Reg]:
            body((*outer, index), lanes)
            return []

        vectors(e, shape[-1], inner)
        for at, width in pieces(shape[-1], e.code.module.machine.lanes):
            with e.scope():
                body((*outer, Index((), at, 1 if width else 0)), width)

    over(e, shape[:-1], row)


def _row(e: Elements, group: Group, outer: Place) -> None:
    """All that one row of the last dim needs.

    Long rows are reduced to several totals side by side, for each addition waits for the one before it.
    """
    code, size, lanes = e.code, group.space[-1], e.code.module.machine.lanes
    name = code.fresh("i")
    e.ahead(group.sources, outer, f"%{name}")
    side = _SIDE if group.reduces and size >= _SIDE * lanes else 1
    starts = [known(_identity(op), op.result.tile.dtype, lanes) for op in group.reduces] * side

    def body(i: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            index = index_of(i, 1)
            found = [x for n in range(side) for x in _vector(e, group, (*outer, index.shifted(n * lanes)), lanes)]
            return [combine(code, op, t, x) for op, t, x in zip(group.reduces * side, totals, found, strict=True)]

    whole = size // (side * lanes) * side * lanes
    many = code.loop(0, whole, side * lanes, body, *starts, index=name)
    parts = [many[n : n + len(group.reduces)] for n in range(0, len(many), len(group.reduces) or 1)]
    found: list[list[Reg]] = []
    if whole and group.reduces:
        while len(parts) > 1:
            parts = [_both(code, group, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        found.append([horizontal(code, op, x) for op, x in zip(group.reduces, parts[0], strict=True)])
    rest = [(at, lanes) for at in range(whole, size - lanes + 1, lanes)]
    for at, width in [*rest, *pieces(size, lanes)]:
        with e.scope():
            row = _vector(e, group, (*outer, Index((), at, 1 if width else 0)), width)
            found.append([horizontal(code, op, x) for op, x in zip(group.reduces, row, strict=True)])
    totals = found[0] if found else [known(_identity(op), op.result.tile.dtype) for op in group.reduces]
    for more in found[1:]:
        totals = _both(code, group, totals, more)
    for op, total in zip(group.reduces, totals, strict=True):
        e.put(op.result, total, outer)


def _both(code: Code, group: Group, totals: list[Reg], more: list[Reg]) -> list[Reg]:
    return [combine(code, op, x, y) for op, x, y in zip(group.reduces, totals, more, strict=True)]


def _vector(e: Elements, group: Group, place: Place, lanes: int) -> list[Reg]:
    """Compute one vector of everything, then store; the elements to reduce."""
    mapped = [e.at(m.value, place, lanes) for m in group.maps]
    stored = [e.at(op.value, place, lanes) for op in group.stores]
    reduced = [e.at(op.operands[0], place, lanes) for op in group.reduces]
    for op in group.stores:
        if op.mask is not None:
            e.at(op.mask, place, lanes)  # known from here on: a tile may take its place
    for m, x in zip(group.maps, mapped, strict=True):
        e.store(x, e.slot(m.slot), group.space, m.value.tile.dtype, place)
    for op, x in zip(group.stores, stored, strict=True):
        e.store_access(op, x, place, op.mask)
    return reduced


# --- reductions ------------------------------------------------------------------------------------------------------


def _identity(op: Reduce) -> np.ndarray:
    return np.asarray(identity(op.monoid, op.result.tile.dtype))


def combine(code: Code, op: Reduce, total: Reg, x: Reg) -> Reg:
    """A partial result, and more."""
    return combined(code, op.monoid, op.result.tile.dtype, x, total)


def combined(code: Code, monoid: Monoid, dtype: DType, x: Reg, y: Reg) -> Reg:
    """Two numbers under a monoid."""
    if kind_of(dtype) == "bool":
        return code.binary(on_bools(monoid), x, y)
    return compute(code, combining(monoid), dtype, x, y)


def horizontal(code: Code, op: Reduce, x: Reg) -> Reg:
    """All lanes of a partial result in one."""
    return lanes_in_one(code, op.monoid, op.result.tile.dtype, x)


def lanes_in_one(code: Code, monoid: Monoid, dtype: DType, x: Reg) -> Reg:
    """All lanes under a monoid: the upper half with the lower half, and so on."""
    while x.type.lanes > 1:
        half = x.type.lanes // 2
        if half == 1:
            low, high = code.extract(x, 0), code.extract(x, 1)
        else:
            low, high = (code.shuffle(x, x, range(at, at + half)) for at in (0, half))
        x = combined(code, monoid, dtype, high, low)
    return x
