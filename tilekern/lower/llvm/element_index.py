"""Coordinates of elements as affine functions of loop counters, and the coordinates that virtual ops read.

A *virtual* op needs no memory: its result is computed element by element where it is used. Virtual ops are elementwise,
or only move elements. `operand_coords` maps an element's coordinates in a result to coordinates in the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Iota, Reshape, Reverse, Slice, Transpose


@record
class Index:
    """An affine index: `const`, plus a stride times each register in `terms`, plus `step` times the lane's number."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0
    step: int = 0

    def plus(self, other: Index) -> Index:
        """The sum of two indices."""
        terms = dict(self.terms)
        for name, stride in other.terms:
            terms[name] = terms.get(name, 0) + stride
        nonzero = tuple((name, stride) for name, stride in terms.items() if stride)
        return Index(nonzero, self.const + other.const, self.step + other.step)

    def times(self, factor: int) -> Index:
        """The index times a constant."""
        if not factor:
            return ZERO
        return Index(tuple((n, s * factor) for n, s in self.terms), self.const * factor, self.step * factor)

    def shifted(self, by: int) -> Index:
        """The index plus a constant."""
        return replace(self, const=self.const + by)

    def mentions(self, name: str) -> bool:
        """True if the index depends on a register."""
        return any(n == name for n, _ in self.terms)


ZERO = Index()

Coords = tuple[Index, ...]
"""The coordinates of an element, or of a vector of elements: one index for each dim of the tile."""


class Request(NamedTuple):
    """An element of a tile, or a vector of `lanes` elements; `lanes` is 0 for the element of lane 0 alone."""

    value: Value
    coords: Coords
    lanes: int

    @classmethod
    def of(cls, value: Value, coords: Coords, lanes: int = 0) -> Request:
        """The request, in the form that is equal for equal elements."""
        return cls(value, coords if lanes else tuple(Index(i.terms, i.const) for i in coords), lanes)

    @property
    def is_splat(self) -> bool:
        """True if all lanes of the vector are one element."""
        return self.lanes > 0 and not any(index.step for index in self.coords)


def linear(coords: Coords, strides: Sequence[int]) -> Index:
    """The sum of the coordinates times the strides."""
    total = ZERO
    for index, stride in zip(coords, strides, strict=True):
        total = total.plus(index.times(stride))
    return total


def register(name: str, step: int = 0) -> Index:
    """The value of an i64 register, plus `step` times the lane's number."""
    return Index(((name, 1),), 0, step)


class ElementMap(NamedTuple):
    """The element of a tile that each element of an iteration space reads.

    Attributes:
      domain: the shape of the iteration space.
      coords: the coordinates in the tile, as functions of the space's loop counters `d0`, `d1`, ....
    """

    domain: tuple[int, ...]
    coords: Coords

    @classmethod
    def over(cls, domain: tuple[int, ...], rank: int | None = None) -> ElementMap:
        """The map whose coordinates are the first `rank` loop counters of a space, or all counters."""
        return cls(domain, _counters(len(domain) if rank is None else rank))

    def to(self, coords: Coords) -> ElementMap:
        """A map of the same space to other coordinates."""
        return ElementMap(self.domain, coords)

    def is_identity_of(self, shape: tuple[int, ...]) -> bool:
        """True if the space has the shape of a tile, and each element reads the tile's element in its place.

        Equal coordinates alone do not suffice: a space of [4, 1] over f32[4, 32] reads one column of 32.
        """
        return shape == self.domain and self.coords == _counters(len(shape))


@cache
def _counters(rank: int) -> Coords:
    return tuple(register(f"d{d}") for d in range(rank))


def insert_index(coords: Coords, dim: int, index: Index) -> Coords:
    """Coordinates with one more index, inserted for dim number `dim`."""
    return (*coords[:dim], index, *coords[dim:])


def is_virtual(op: Op) -> bool:
    """True if an op is virtual. A load is virtual if no program stores to its array."""
    match op:
        case Load():
            return op.ref.ref.role == "in"
        case Reshape():
            return changes_unit_dims_only(op)
        case _:
            moves = (Broadcast, Transpose, Slice, Reverse, Iota, Constant, DynamicSlice)
            return isinstance(op, (Elementwise, Select, Convert, Bitcast, *moves))


def changes_unit_dims_only(op: Reshape) -> bool:
    """True if a reshape only adds and drops dims of size 1."""
    return _other_dims(op.operands[0].tile.shape) == _other_dims(op.shape)


def _other_dims(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def operand_coords(op: Op, coords: Coords, clamped: Callable[[Value, int], Index]) -> list[tuple[Value, Coords]]:
    """The tile operands that an element of a virtual op's result depends on, each with the coordinates it reads.

    Args:
      op: a virtual op. Operands of a load are its mask and its vectors of positions.
      coords: the coordinates in the result.
      clamped: gives an int32 scalar, limited to 0 .. n, as an index.
    """
    match op:
        case Elementwise() | Select() | Convert() | Bitcast():
            return [(x, coords) for x in op.operands]
        case Broadcast(operands=(x,)):
            sizes = zip(op.dims, x.tile.shape, strict=True)
            return [(x, tuple(ZERO if n == 1 else coords[d] for d, n in sizes))]
        case Transpose(operands=(x,)):
            return [(x, tuple(coords[op.permutation.index(d)] for d in range(len(coords))))]
        case Slice(operands=(x,)):
            moved = zip(coords, op.start, op.stride, strict=True)
            return [(x, tuple(i.times(stride).shifted(start) for i, start, stride in moved))]
        case Reverse(operands=(x,)):
            lengths = enumerate(zip(coords, x.tile.shape, strict=True))
            return [(x, tuple(i.times(-1).shifted(n - 1) if d in op.dims else i for d, (i, n) in lengths))]
        case Reshape(operands=(x,)):
            long = iter(i for i, n in zip(coords, op.shape, strict=True) if n != 1)
            return [(x, tuple(ZERO if n == 1 else next(long) for n in x.tile.shape))]
        case DynamicSlice(operands=(x, *starts)):
            room = zip(coords, starts, x.tile.shape, op.sizes, strict=True)
            return [(x, tuple(i.plus(clamped(start, n - size)) for i, start, n, size in room))]
        case Load():
            return _coords_of_load(op, coords)
        case _:
            return []


def _coords_of_load(op: Load, coords: Coords) -> list[tuple[Value, Coords]]:
    operands: list[tuple[Value, Coords]] = []
    for dim, lane in zip(op.access.dims, op.access.lanes, strict=True):
        if lane is not None:
            vectors = (op.positions[t.operand] for t in dim.position.terms)
            operands += [(v, (coords[lane],)) for v in vectors if v.tile.shape]
    return operands if op.mask is None else [*operands, (op.mask, coords)]
