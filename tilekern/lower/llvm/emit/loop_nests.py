"""Loop nests: vectors along the last dim, and its tail by vectors of half, a quarter, ... of the lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tilekern.ir.compute import Monoid, Reduce, combining, identity, on_bools
from tilekern.ir.memory import Load
from tilekern.ir.types import DType, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index
from tilekern.lower.llvm.element_types import element_constant
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg
from tilekern.lower.llvm.plan.steps import LoopNest


def emit(e: Elements, nest: LoopNest) -> None:
    """Emit a loop nest. The loops have the place of the first op of which it computes a result."""
    definition = e.expressions.definition
    first = next(iter((*nest.reduces, *nest.stores, *(definition[m.value] for m in nest.maps))))
    with e.code.at(first.loc):
        _emit(e, nest)


def _emit(e: Elements, nest: LoopNest) -> None:
    if not _reduces_four_rows(e, nest):
        loop_over(e, nest.space[:-1], lambda coords: _row(e, nest, coords))
        return

    def fours(outer: Coords) -> None:
        def body(i: Reg) -> None:
            with e.scope():
                _four_rows(e, nest, outer, index_of(i))

        e.code.loop(0, nest.space[-2], 4, body)

    loop_over(e, nest.space[:-2], fours)


def _reduces_four_rows(e: Elements, nest: LoopNest) -> bool:
    """True if four rows are reduced at once: a few shuffles then reduce the lanes of all four.

    Long rows that come from an array are reduced one after the other, see `calibration.MIN_STREAMED_VECTORS`.
    """
    if not nest.reduces or len(nest.space) < 2:
        return False
    size, lanes = nest.space[-1], e.code.module.machine.lanes
    if size >= calibration.MIN_STREAMED_VECTORS * lanes and _loads_rows(e, nest):
        return False
    return nest.space[-2] % 4 == 0 and size > 0 and size % lanes == 0


def _loads_rows(e: Elements, nest: LoopNest) -> bool:
    """True if the nest loads a tile of several rows from an array."""
    fused, definition = e.expressions.of(nest.space, nest.sources).inner, e.expressions.definition
    return any(isinstance(definition[value], Load) and value.tile.shape[:-1] not in ((), (1,)) for value in fused)


def _four_rows(e: Elements, nest: LoopNest, outer: Coords, first: Index) -> None:
    """Emit the loop over four rows, and the reductions of their lanes."""
    code, lanes, reduces = e.code, e.code.module.machine.lanes, nest.reduces
    name = code.fresh("i")
    rows = [(*outer, first.shifted(n)) for n in range(4)]
    for row in rows:
        e.hoist(nest.sources, row, f"%{name}")
    starts = [element_constant(_identity(op), op.result.tile.dtype, lanes) for op in reduces] * 4

    def body(i: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            vectors = [x for row in rows for x in _vector(e, nest, (*row, index_of(i, 1)), lanes)]
            return [_combine_at(code, op, t, x) for op, t, x in zip(reduces * 4, totals, vectors, strict=True)]

    many = code.loop(0, nest.space[-1], lanes, body, *starts, index=name)
    for n, op in enumerate(reduces):
        with code.at(op.loc):
            totals = reduce_vectors(code, op.monoid, op.result.tile.dtype, many[n :: len(reduces)])
            e.write(op.result, totals, (*outer, Index(first.terms, first.const, 1)))


def reduce_vectors(code: Code, monoid: Monoid, dtype: DType, vectors: list[Reg]) -> Reg:
    """Reduce the lanes of each vector: lane n of the result is the total of vector n.

    Both the number of vectors and of lanes are powers of two, and there are no more vectors than lanes.
    """
    lanes, parts = vectors[0].type.lanes, 1  # each vector has so many parts, one for each total
    while len(vectors) > 1:
        size = lanes // parts
        low = [p * size + n for p in range(2 * parts) for n in range(size // 2)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_add_halves(code, monoid, dtype, a, b, low, size // 2) for a, b in pairs]
        parts *= 2
    (x,) = vectors
    while x.type.lanes > parts:
        size = x.type.lanes // parts
        low = [p * size + n for p in range(parts) for n in range(size // 2)]
        x = _add_halves(code, monoid, dtype, x, x, low, size // 2)
    return x


def _add_halves(code: Code, monoid: Monoid, dtype: DType, a: Reg, b: Reg, low: list[int], size: int) -> Reg:
    """Combine the lanes `low` of two vectors with the lanes `size` further on."""
    return apply_monoid(code, monoid, dtype, code.shuffle(a, b, [n + size for n in low]), code.shuffle(a, b, low))


def loop_over(e: Elements, shape: tuple[int, ...], body: Callable[[Coords], None], coords: Coords = ()) -> None:
    """Emit one loop for each dim around `body(coords)`."""
    if not shape:
        body(coords)
        return

    def inner(i: Reg) -> None:
        with e.scope():
            loop_over(e, shape[1:], body, (*coords, index_of(i)))

    e.code.loop(0, shape[0], 1, inner)


def tail_pieces(size: int, lanes: int) -> Iterator[tuple[int, int]]:
    """The tail of a dim after its last whole vector, as vectors: (start, lanes), with 0 lanes for one element."""
    at = size // lanes * lanes
    while at < size:
        lanes //= 2
        if at + lanes <= size:
            yield at, lanes if lanes > 1 else 0
            at += lanes


def for_each_vector(
    e: Elements, shape: tuple[int, ...], body: Callable[[Coords, int], None], scalars: bool = False
) -> None:
    """Emit `body(coords, lanes)` for every vector along the last dim of a space, tails included.

    With `scalars`, for every element instead; `lanes` is 0 then.
    """
    for_neighbours(e, shape, lambda coords, lanes: body(coords[0], lanes), scalars, most=1)


def for_neighbours(
    e: Elements,
    shape: tuple[int, ...],
    body: Callable[[list[Coords], int], None],
    scalars: bool = False,
    most: int = calibration.NEIGHBOURS,
) -> None:
    """Emit `body(coords of vectors side by side, lanes)` for every `most` vectors, and for each remaining vector."""
    lanes = e.code.module.machine.lanes
    if scalars or not shape:
        loop_over(e, shape, lambda coords: body([coords], 0))
        return

    def loop(outer: Coords, start: int, count: int) -> int:
        stop = start + (shape[-1] - start) // (count * lanes) * count * lanes

        def inner(i: Reg) -> None:
            with e.scope():
                body([(*outer, index_of(i, 1).shifted(n * lanes)) for n in range(count)], lanes)

        e.code.loop(start, stop, count * lanes, inner)
        return stop

    def row(outer: Coords) -> None:
        at = 0
        for count in sorted({most, 1}, reverse=True):
            at = loop(outer, at, count)
        for at, width in tail_pieces(shape[-1], lanes):
            with e.scope():
                body([(*outer, Index((), at, 1 if width else 0))], width)

    loop_over(e, shape[:-1], row)


def _row(e: Elements, nest: LoopNest, outer: Coords) -> None:
    """Emit the loop over one row, and the reductions of its lanes.

    Long rows have several accumulators, since each addition waits for the previous one in its accumulator.
    """
    code, size, lanes = e.code, nest.space[-1], e.code.module.machine.lanes
    name = code.fresh("i")
    e.hoist(nest.sources, outer, f"%{name}")
    count = calibration.ACCUMULATORS if nest.reduces and size >= calibration.ACCUMULATORS * lanes else 1
    starts = [element_constant(_identity(op), op.result.tile.dtype, lanes) for op in nest.reduces] * count

    def body(i: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            index = index_of(i, 1)
            vectors = [x for n in range(count) for x in _vector(e, nest, (*outer, index.shifted(n * lanes)), lanes)]
            rows = zip(nest.reduces * count, totals, vectors, strict=True)
            return [_combine_at(code, op, t, x) for op, t, x in rows]

    whole = size // (count * lanes) * count * lanes
    many = code.loop(0, whole, count * lanes, body, *starts, index=name)
    parts = [many[n : n + len(nest.reduces)] for n in range(0, len(many), len(nest.reduces) or 1)]
    partials: list[list[Reg]] = []
    if whole and nest.reduces:
        while len(parts) > 1:
            parts = [_combine_all(code, nest, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        (vectors,) = parts
        for at in range(whole, size - lanes + 1, lanes):
            with e.scope():
                row = _vector(e, nest, (*outer, Index((), at, 1)), lanes)
                vectors = [_combine_at(code, op, t, x) for op, t, x in zip(nest.reduces, vectors, row, strict=True)]
        partials.append([reduce_op_lanes(code, op, x) for op, x in zip(nest.reduces, vectors, strict=True)])
    for at, width in tail_pieces(size, lanes):
        with e.scope():
            row = _vector(e, nest, (*outer, Index((), at, 1 if width else 0)), width)
            partials.append([reduce_op_lanes(code, op, x) for op, x in zip(nest.reduces, row, strict=True)])
    totals = partials[0] if partials else [element_constant(_identity(op), op.result.tile.dtype) for op in nest.reduces]
    for more in partials[1:]:
        totals = _combine_all(code, nest, totals, more)
    for op, total in zip(nest.reduces, totals, strict=True):
        e.write(op.result, total, outer)


def _combine_all(code: Code, nest: LoopNest, totals: list[Reg], more: list[Reg]) -> list[Reg]:
    return [_combine_at(code, op, x, y) for op, x, y in zip(nest.reduces, totals, more, strict=True)]


def _vector(e: Elements, nest: LoopNest, coords: Coords, lanes: int) -> list[Reg]:
    """Compute a vector of each result, then store tiles and arrays; returns the vectors to reduce."""
    mapped = [e.element(m.value, coords, lanes) for m in nest.maps]
    stored = [e.element(op.value, coords, lanes) for op in nest.stores]
    reduced = [e.element(op.operands[0], coords, lanes) for op in nest.reduces]
    for op in nest.stores:
        if op.mask is not None:
            e.element(op.mask, coords, lanes)  # computed before the stores, since a tile may overwrite its buffer
    for m, x in zip(nest.maps, mapped, strict=True):
        with e.code.at(e.expressions.definition[m.value].loc):
            e.store(x, e.buffer_address(m.buffer), nest.space, m.value.tile.dtype, coords)
    for op, x in zip(nest.stores, stored, strict=True):
        with e.code.at(op.loc):
            e.store_access(op, x, coords, op.mask)
    return reduced


# --- reductions ------------------------------------------------------------------------------------------------------


def _identity(op: Reduce) -> np.ndarray:
    return np.asarray(identity(op.monoid, op.result.tile.dtype))


def _combine_at(code: Code, op: Reduce, total: Reg, x: Reg) -> Reg:
    """Combine an accumulator with another vector, at the place of the reduction."""
    with code.at(op.loc):
        return combine(code, op, total, x)


def combine(code: Code, op: Reduce, total: Reg, x: Reg) -> Reg:
    """Combine an accumulator with another vector."""
    return apply_monoid(code, op.monoid, op.result.tile.dtype, x, total)


def apply_monoid(code: Code, monoid: Monoid, dtype: DType, x: Reg, y: Reg) -> Reg:
    """Combine two numbers by a monoid."""
    if kind_of(dtype) == "bool":
        return code.binary(on_bools(monoid), x, y)
    return compute(code, combining(monoid), dtype, x, y)


def reduce_op_lanes(code: Code, op: Reduce, x: Reg) -> Reg:
    """Reduce the lanes of an accumulator."""
    return reduce_lanes(code, op.monoid, op.result.tile.dtype, x)


def reduce_lanes(code: Code, monoid: Monoid, dtype: DType, x: Reg) -> Reg:
    """Reduce the lanes of a vector: combine the upper half with the lower one, and so on."""
    while x.type.lanes > 1:
        half = x.type.lanes // 2
        if half == 1:
            low, high = code.extract(x, 0), code.extract(x, 1)
        else:
            low, high = (code.shuffle(x, x, range(at, at + half)) for at in (0, half))
        x = apply_monoid(code, monoid, dtype, high, low)
    return x
