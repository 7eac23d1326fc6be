"""Bytes that accesses read and write, each with its distance: the bytes that are touched between two uses of it.

A cache that holds the distance still has the bytes at their second use. Loops run one after the other, as on a thread
of a CPU: a loop that does not move an access repeats it, after all that one iteration touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tilekern.blocks.tiling import Number, TileAccess, Tiling


class Traffic(NamedTuple):
    """Bytes of an access that have one distance.

    Attributes:
      access: the access.
      bytes: the bytes, in all programs together.
      distance: the bytes that are touched until they are used again; None for bytes that no earlier access touched.
    """

    access: TileAccess
    bytes: Number
    distance: Number | None

    @property
    def tiles(self) -> Number:
        """The number of tiles that these bytes are."""
        return self.bytes / np.maximum(self.access.tile.bytes, 1)


def traffic(tiling: Tiling) -> Iterator[Traffic]:
    """The traffic of all accesses, in their order."""
    for number, access in enumerate(tiling.accesses):
        depth = _shared_depth(access, tiling.accesses[:number])
        counts, touched = [loop.count for loop in access.loops], _touched(access)
        for n in range(depth, len(counts)):
            if not access.moved_by[n]:
                repeats = math.prod(counts[:n], start=1.0) * np.maximum(counts[n] - 1, 0)
                yield Traffic(access, repeats * touched[n + 1], _distance(tiling.accesses, access.path[: n + 1]))
        once = access.times * access.tile.bytes
        if np.any(np.asarray(access.rows_of_use) > 1):
            yield Traffic(access, once * (access.rows_of_use - 1), _bytes_of_row(tiling.accesses, access.path))
        if access.passes > 1:
            yield Traffic(access, once * (access.passes - 1), _distance(tiling.accesses, access.path))
        first = math.prod(counts[:depth], start=1.0) * touched[depth]
        if depth and access.shift is not None and access.shift.depth is not None:
            # Rows that the earlier access has not touched in this iteration: it did in another one of the loop around.
            part = _part_apart(access)
            around = _distance(tiling.accesses, access.path[: access.shift.depth + 1])
            yield Traffic(access, first * part, around)
            first = first * (1 - part)
        yield Traffic(access, first, _distance(tiling.accesses, access.path[:depth]) if depth else None)


def _shared_depth(access: TileAccess, earlier: Sequence[TileAccess]) -> int:
    """The number of loops that an access has in common with an earlier one of its array; 0 if it is the first.

    Example: loops i and k around the first access, i and l around the second one -> 1: in an iteration of i, the first
    access has touched the array before the second one does. Rows that no loop moves are rows of the access alone.
    """
    if access.shift is not None and access.shift.depth is None:
        return 0
    return max((_common(access.path, e.path) for e in earlier if e.array == access.array), default=0)


def _common(path: Sequence[int], earlier_path: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    pairs = zip(path, earlier_path, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(path), len(earlier_path)))


def _touched(access: TileAccess) -> list[Number]:
    """For n = 0, 1, ... the bytes that the access touches in one iteration of its n outermost loops.

    Example: a tile of 8 bytes that a loop of 4 iterations moves, with a loop of 3 around it -> [32, 32, 8].
    """
    touched = [access.tile.bytes]
    for loop, moves in zip(reversed(access.loops), reversed(access.moved_by), strict=True):
        larger = touched[-1] * loop.count if moves else touched[-1]
        touched.append(np.minimum(larger, access.array_bytes))
    return touched[::-1]


def _bytes_of_row(accesses: Sequence[TileAccess], path: tuple[int, ...]) -> Number:
    """The bytes of one row of each tile of an iteration: a pass touches so many until it is at the next row."""
    return sum(access.tile.inner * access.itemsize for access in accesses if access.path == path)


def _distance(accesses: Sequence[TileAccess], path: tuple[int, ...]) -> Number:
    """The bytes that all accesses inside of some loops touch while these stand still, each byte of an array once."""
    of_arrays: dict[int, Number] = {}
    apart: Number = 0
    for access in accesses:
        if access.path[: len(path)] == path:
            touched = _touched(access)[len(path)]
            of_arrays[access.array] = np.maximum(of_arrays.get(access.array, 0), touched)
            apart = apart + (touched * _part_apart(access) if access.shift is not None else 0)
    return sum(of_arrays.values()) + apart


def _part_apart(access: TileAccess) -> Number:
    """The part of an access's rows that the nearest access of the array does not touch."""
    assert access.shift is not None
    return np.minimum(access.shift.elements / np.maximum(access.sizes[access.shift.dim], 1), 1)
