"""Sorts by bitonic networks, and top-k by repeated maxima or by a sort; Mosaic has neither.

K. Batcher, "Sorting networks and their applications" (1968). The size is padded to a power of two. For groups of 2, 4,
8, ... elements, and distances of half a group, a quarter, ..., 1, element i is compared with element i xor distance.
The smaller one goes to the lower index, or to the higher index in every other group. The index of an element is its
last key, so no two elements are equal: the sort is stable, and the padding stays at the end.
"""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.types import I32, TileType
from tilekern.lower.mosaic.legalize.movement import exchanged, filled, has_bit, lanes, power_of_two
from tilekern.lower.rewrite.sort_key import sort_key


def sort(make: Make, op: Sort) -> Value:
    """Operand number `op.pick` in the order of the keys, stable and ascending along `op.dim`."""
    keys = [_signed(make, sort_key(make, x)) for x in op.operands[: op.num_keys]]
    return _sorted(make, keys, op.operands[op.pick], op.dim)


_FEW = 16
"""Up to so many maxima take fewer ops than a network, which has some 20 ops a step and 28 steps for 128 lanes."""


def top_k(make: Make, op: TopK) -> Value:
    """int32 positions of the `op.k` greatest elements along `op.dim`, the greatest first.

    Few come from repeated maxima, many from a sort by the inverted keys.
    """
    (x,) = op.operands
    key = _signed(make, sort_key(make, x))
    if op.k <= _FEW:
        return _selected(make, key, op.dim, op.k)
    return make.part(_sorted(make, [make.of("not", key)], None, op.dim), op.dim, 0, op.k)


def _selected(make: Make, key: Value, dim: int, count: int) -> Value:
    """int32 positions of the `count` greatest keys along `dim`, by maxima: the first position of each is closed.

    A closed position gets the least key and counts as `size`, so open ones win also if the maximum is the least key.
    """
    shape = key.tile.shape
    if len(shape) == 1:
        positions = _selected(make, make.reshape(key, (1, *shape)), 1, count)
        return make.reshape(positions, (count,))
    size, other_dims = shape[dim], tuple(d for d in range(len(shape)) if d != dim)
    places = open_ = lanes(make, shape, dim)
    result_shape = (*shape[:dim], count, *shape[dim + 1 :])
    positions = make.number(0, TileType(result_shape, I32))
    for n in range(count):
        most = make.broadcast(make.reduce(key, "max", dim), shape, other_dims)
        first = make.reduce(make.select(make.of("eq", key, most), open_, size), "min", dim)
        positions = make.select(
            make.of("eq", lanes(make, result_shape, dim), n), make.broadcast(first, result_shape, other_dims), positions
        )
        taken = make.of("eq", places, make.broadcast(first, shape, other_dims))
        key, open_ = make.select(taken, -(1 << 31), key), make.select(taken, size, open_)
    return positions


def _signed(make: Make, key: Value) -> Value:
    """int32 keys of a tile, in the order of `key`: int32 or uint32, as `sort_key` returns for up to 32 bits."""
    return key if key.tile.dtype == I32 else make.bitcast(make.of("xor", key, 1 << 31), I32)


def _sorted(make: Make, keys: list[Value], picked: Value | None, dim: int) -> Value:
    """The picked tile in the order of the int32 keys along `dim`; None: int32 positions of the sorted elements."""
    shape = keys[0].tile.shape
    size = shape[dim]
    whole = power_of_two(size)
    tiles = [*keys, lanes(make, (*shape[:dim], whole, *shape[dim + 1 :]), dim)]
    count = len(tiles)
    if picked is not None:
        tiles.append(picked)
    for n, x in enumerate(tiles):
        # The padding has the greatest key; all positions are different.
        most = make.number((1 << 31) - 1 if n < len(keys) else 0, TileType((), x.tile.dtype))
        tiles[n] = make.joined(dim, x, filled(make, most, x.tile.shape, dim, whole - x.tile.shape[dim]))
    group = 2
    while group <= whole:
        distance = group // 2
        while distance:
            tiles = _step(make, tiles, count, dim, group if group < whole else 0, distance)
            distance //= 2
        group *= 2
    return make.part(tiles[-1], dim, 0, size)


def _step(make: Make, tiles: list[Value], count: int, dim: int, group: int, distance: int) -> list[Value]:
    """The tiles after pairs at a distance are compared and exchanged; the first `count` tiles are the keys.

    Groups whose positions have the bit `group` descend; 0 for none.
    """
    partners = [exchanged(make, x, dim, distance) for x in tiles]
    lane = lanes(make, tiles[0].tile.shape, dim)
    smaller = _less(make, partners[:count], tiles[:count])
    keeps_greater = has_bit(make, lane, distance)
    if group:
        keeps_greater = make.of("xor", keeps_greater, has_bit(make, lane, group))
    swaps = make.of("xor", smaller, keeps_greater)
    return [make.select(swaps, y, x) for x, y in zip(tiles, partners, strict=True)]


def _less(make: Make, left: list[Value], right: list[Value]) -> Value:
    """True where the left keys come first in lexicographic order; no two are equal."""
    less = make.of("lt", left[-1], right[-1])
    for a, b in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        less = make.of("or", make.of("lt", a, b), make.of("and", make.of("eq", a, b), less))
    return less
