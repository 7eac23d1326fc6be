"""Ops that move elements, by slices, concatenations, broadcasts, transpositions and reshapes, which Mosaic has.

Needs: a Func after `widen_moves`; `interleave` handles strides and interior pads along the last dim. Gives: a Func
without `Pad`, `Reverse`, `DynamicSlice`, `DynamicUpdateSlice` and strided slices. Its `Take`s are of [rows, 128] along
the lanes, since the hardware gathers within vector registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilekern.ir.core import Value, round_up
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.make import Make
from tilekern.ir.shape import Iota, Pad, Reverse, Slice
from tilekern.ir.types import I32, TileType

LANES = 128
"""The lanes of a vector register."""


def lanes(make: Make, shape: tuple[int, ...], dim: int) -> Value:
    """The index of each element along `dim`, int32."""
    return make.add(Iota, shape=shape, dtype=I32, dim=dim)


def filled(make: Make, value: Value, like: tuple[int, ...], dim: int, size: int) -> Value:
    """A scalar, repeated to the shape `like` with another size along `dim`."""
    return make.broadcast(value, (*like[:dim], size, *like[dim + 1 :]), ())


def rolled(make: Make, x: Value, dim: int, by: int) -> Value:
    """A rotation along `dim`: element i moves to i + by, modulo the size."""
    size = x.tile.shape[dim]
    cut = (size - by) % size
    return make.joined(dim, make.part(x, dim, cut, size), make.part(x, dim, 0, cut))


def has_bit(make: Make, number: Value, bit: int) -> Value:
    """True where a number has a bit."""
    return make.of("ne", make.of("and", number, bit), 0)


def exchanged(make: Make, x: Value, dim: int, distance: int) -> Value:
    """The elements i xor distance; the distance is a power of two, the size a multiple of twice the distance."""
    later, earlier = rolled(make, x, dim, -distance), rolled(make, x, dim, distance)
    return make.select(has_bit(make, lanes(make, x.tile.shape, dim), distance), earlier, later)


def power_of_two(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(size - 1, 0).bit_length()


# --- along one dim --------------------------------------------------------------------------------------------------


def reverse(make: Make, op: Reverse) -> Value:
    """Reverse along each dim in turn: of 2^k elements, element i comes from i xor (2^k - 1), bit by bit."""
    (x,) = op.operands
    for dim in op.dims:
        size = x.tile.shape[dim]
        if size <= 8:
            x = make.joined(dim, *(make.part(x, dim, n, n + 1) for n in reversed(range(size))))
            continue
        whole = power_of_two(size)
        x = make.joined(dim, x, filled(make, make.number(0, _scalar(x)), x.tile.shape, dim, whole - size))
        distance = 1
        while distance < whole:
            x = exchanged(make, x, dim, distance)
            distance *= 2
        x = make.part(x, dim, whole - size, whole)
    return x


def _scalar(x: Value) -> TileType:
    return TileType((), x.tile.dtype)


def pad(make: Make, op: Pad) -> Value:
    """Along each dim in turn, spread the elements, join them with the fill, and cut negative pads."""
    x, fill = op.operands
    for dim, (low, high, interior) in enumerate(zip(op.low, op.high, op.interior, strict=True)):
        if interior and x.tile.shape[dim] > 1:
            x = _spread(make, x, fill, dim, interior)
        shape = x.tile.shape
        x = make.joined(
            dim,
            filled(make, fill, shape, dim, max(low, 0)),
            x,
            filled(make, fill, shape, dim, max(high, 0)),
        )
        x = make.part(x, dim, max(-low, 0), x.tile.shape[dim] - max(-high, 0))
    return x


def _spread(make: Make, x: Value, fill: Value, dim: int, between: int) -> Value:
    """Elements along `dim` with `between` fills after each, joined along a new dim that is then merged with `dim`."""
    outer, size, inner = x.tile.shape[:dim], x.tile.shape[dim], x.tile.shape[dim + 1 :]
    alone = make.reshape(x, (*outer, size, 1, *inner))
    pairs = make.joined(dim + 1, alone, filled(make, fill, alone.tile.shape, dim + 1, between))
    merged = make.reshape(pairs, (*outer, size * (between + 1), *inner))
    return make.part(merged, dim, 0, size * (between + 1) - between)


def slice_(make: Make, op: Slice) -> Value:
    """Cut along each dim; of a stride, keep the first of each group of elements."""
    (x,) = op.operands
    for dim, (start, stop, stride) in enumerate(zip(op.start, op.stop, op.stride, strict=True)):
        count = len(range(start, stop, stride))
        x = make.part(x, dim, start, stop if stride == 1 or not count else start + (count - 1) * stride + 1)
        if stride > 1 and count > 1:
            x = _thinned(make, x, dim, count, stride)
    return x


def _thinned(make: Make, x: Value, dim: int, count: int, stride: int) -> Value:
    missing = count * stride - x.tile.shape[dim]
    x = make.joined(dim, x, filled(make, make.number(0, _scalar(x)), x.tile.shape, dim, missing))
    outer, inner = x.tile.shape[:dim], x.tile.shape[dim + 1 :]
    groups = make.reshape(x, (*outer, count, stride, *inner))
    return make.reshape(make.part(groups, dim + 1, 0, 1), (*outer, count, *inner))


# --- at computed places ---------------------------------------------------------------------------------------------


def _shifted(make: Make, x: Value, dim: int, start: Value, most: int, sign: int) -> Value:
    """A rotation by a computed number from 0 to `most`, forward or back: by one of its bits after the other."""
    bit = 1
    while bit <= most:
        moved = rolled(make, x, dim, sign * bit)
        set_ = has_bit(make, make.broadcast(start, x.tile.shape, ()), bit)
        x = make.select(set_, moved, x)
        bit *= 2
    return x


def _clamped(make: Make, start: Value, room: int) -> Value:
    return make.of("min", make.of("max", start, 0), room)


def dynamic_slice(make: Make, op: DynamicSlice) -> Value:
    """Rotate the slice to the front and cut it there."""
    x, *starts = op.operands
    for dim, (size, start) in enumerate(zip(op.sizes, starts, strict=True)):
        before = x.tile.shape[dim]
        if size == before:
            continue
        x = _shifted(make, x, dim, _clamped(make, start, before - size), before - size, -1)
        x = make.part(x, dim, 0, size)
    return x


def dynamic_update_slice(make: Make, op: DynamicUpdateSlice) -> Value:
    """Pad the update to the size of the tile, rotate it to its place, and select it there."""
    x, update, *starts = op.operands
    shape, sizes = x.tile.shape, update.tile.shape
    inside: Value | None = None
    zero = make.number(0, _scalar(x))
    for dim, (before, size, start) in enumerate(zip(shape, sizes, starts, strict=True)):
        if before == size:
            continue
        first = _clamped(make, start, before - size)
        update = make.joined(dim, update, filled(make, zero, update.tile.shape, dim, before - size))
        update = _shifted(make, update, dim, first, before - size, 1)
        offset = make.of("sub", lanes(make, shape, dim), make.broadcast(first, shape, ()))
        here = make.of("and", make.of("ge", offset, 0), make.of("lt", offset, size))
        inside = here if inside is None else make.of("and", inside, here)
    return update if inside is None else make.select(inside, update, x)


def take(make: Make, op: Take) -> Value:
    """A gather as gathers along the lanes, see `gathered`; one index of a whole tile is a dynamic slice."""
    x, indices = op.operands
    dim, shape = op.dim, x.tile.shape
    if not op.along and indices.tile.size == 1:
        start = make.reshape(indices, ())
        starts = [start if d == dim else make.number(0, start.tile) for d in range(len(shape))]
        sizes = (*shape[:dim], 1, *shape[dim + 1 :])
        line = dynamic_slice(make, DynamicSlice(operands=(x, *starts), sizes=sizes))
        return make.reshape(line, op.result.tile.shape)
    order = (*(d for d in range(len(shape)) if d != dim), dim)
    row_sizes = tuple(shape[d] for d in order[:-1])
    rows = prod(row_sizes)
    lines = make.reshape(make.transpose(x, order), (rows, shape[dim]))
    if rows == 1 and not op.along and len(indices.tile.shape) > 1 and indices.tile.shape[-1] >= LANES:
        return make.reshape(_taken_from_line(make, lines, indices), op.result.tile.shape)
    if op.along:
        count = indices.tile.shape[dim]
        index = make.reshape(make.transpose(indices, order), (rows, count))
    else:
        count = indices.tile.size
        index = make.broadcast(make.reshape(indices, (1, count)), (rows, count), (0, 1))
    taken = make.reshape(gathered(make, lines, _clamped(make, index, shape[dim] - 1)), (*row_sizes, count))
    back = (*range(dim), len(shape) - 1, *range(dim, len(shape) - 1))
    return make.reshape(make.transpose(taken, back), op.result.tile.shape)


def _taken_from_line(make: Make, line: Value, indices: Value) -> Value:
    """Elements of line[1, n] at a tile of indices, whose rows stay where they are: each gathers from the line."""
    size, count = line.tile.shape[1], indices.tile.shape[-1]
    index = make.reshape(indices, (indices.tile.size // count, count))
    lines = make.broadcast(line, (index.tile.shape[0], size), (0, 1))
    return gathered(make, lines, _clamped(make, index, size - 1))


def gathered(make: Make, x: Value, index: Value) -> Value:
    """Elements of x[rows, n] at index[rows, m] along the lanes, all in bounds.

    For each register of indices, gather from each register of the row, and select by the index's upper bits.
    """
    if x.tile.shape[0] == 1:
        # Pallas lowers a gather from a single row to another kind of gather.
        return make.part(gathered(make, make.joined(0, x, x), make.joined(0, index, index)), 0, 0, 1)
    count = index.tile.shape[1]
    parts: list[Value] = []
    for indices in _registers(make, index):
        place, number = make.of("and", indices, LANES - 1), make.of("shift_right_logical", indices, 7)
        elements: Value | None = None
        for n, lines in enumerate(_registers(make, x)):
            of_register = make.take(lines, place, 1)
            elements = of_register if elements is None else make.select(make.of("eq", number, n), of_register, elements)
        assert elements is not None
        parts.append(elements)
    return make.part(make.joined(1, *parts), 1, 0, count)


def _registers(make: Make, x: Value) -> Sequence[Value]:
    """The columns of a tile in parts of 128; the last part is padded with zeros."""
    size = x.tile.shape[1]
    whole = round_up(size, LANES)
    x = make.joined(1, x, filled(make, make.number(0, _scalar(x)), x.tile.shape, 1, whole - size))
    return [make.part(x, 1, n, n + LANES) for n in range(0, whole, LANES)]
