"""Where an element of a tile lies, as a straight line in loop counters; and what ops that move elements do to it.

A *virtual* op is computed where its result is used, element by element, and has no memory of its own: it is
elementwise, or only moves elements. `reads` says which elements of its operands an element of its result comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.shape import Broadcast, Iota, Reshape, Reverse, Slice, Transpose


@dataclass(frozen=True)
class Index:
    """`const`, plus strides times registers, plus `step` for each lane of a vector."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0
    step: int = 0

    def plus(self, other: Index) -> Index:
        """The sum."""
        terms = dict(self.terms)
        for name, stride in other.terms:
            terms[name] = terms.get(name, 0) + stride
        kept = tuple((name, stride) for name, stride in terms.items() if stride)
        return Index(kept, self.const + other.const, self.step + other.step)

    def times(self, factor: int) -> Index:
        """A multiple."""
        if not factor:
            return ZERO
        return Index(tuple((n, s * factor) for n, s in self.terms), self.const * factor, self.step * factor)

    def shifted(self, by: int) -> Index:
        """So many elements further on."""
        return replace(self, const=self.const + by)

    def mentions(self, name: str) -> bool:
        """Whether it depends on a register."""
        return any(n == name for n, _ in self.terms)


ZERO = Index()

Coords = tuple[Index, ...]
"""One index for each dim of a tile."""


def with_index(coords: Coords, dim: int, index: Index) -> Coords:
    """The coordinates with one index more, at `dim`."""
    return (*coords[:dim], index, *coords[dim:])


def register(name: str, step: int = 0) -> Index:
    """The number in a register of type i64, and so many more for each lane."""
    return Index(((name, 1),), 0, step)


def is_virtual(op: Op) -> bool:
    """Whether the op needs no memory for its result. Loads do not of what no program stores to."""
    match op:
        case Load():
            return op.ref.ref.role == "in"
        case Reshape():
            return changes_unit_dims_only(op)
        case _:
            moves = (Broadcast, Transpose, Slice, Reverse, Iota, Constant, DynamicSlice)
            return isinstance(op, (Elementwise, Select, Convert, Bitcast, *moves))


def changes_unit_dims_only(op: Reshape) -> bool:
    """Whether a reshape adds and drops dims of size 1 only."""
    return _long(op.operands[0].tile.shape) == _long(op.shape)


def _long(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def operand_coords(op: Op, coords: Coords, clamped: Callable[[Value, int], Index]) -> list[tuple[Value, Coords]]:
    """The elements of tile operands that the element at `coords` of a virtual op's result comes from.

    Args:
      op: virtual. Of a load, the mask, and the vectors of positions.
      coords: of the element of the result.
      clamped: an int32 scalar, limited to 0 .. n, as an index.
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
            return _read_by_load(op, coords)
        case _:
            return []


def _read_by_load(op: Load, coords: Coords) -> list[tuple[Value, Coords]]:
    found: list[tuple[Value, Coords]] = []
    for dim, lane in zip(op.access.dims, op.access.lanes, strict=True):
        if lane is not None:
            vectors = (op.positions[t.operand] for t in dim.position.terms)
            found += [(v, (coords[lane],)) for v in vectors if v.tile.shape]
    return found if op.mask is None else [*found, (op.mask, coords)]
