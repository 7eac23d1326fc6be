"""Positions of the lanes of an index vector, as int32; accesses without the operands that nothing refers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilekern.ir.analysis.ranges import INT32, Interval, position_interval
from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Access, Dim, MemoryOp, Term
from tilekern.ir.types import I32
from tilekern.lower.positions import wrapped


def fits_int32(op: MemoryOp, number: int, ranges: Mapping[Value, Interval]) -> bool:
    """True if no position along a dim of an access wraps around into the array, where it is computed modulo 2³²."""
    span = position_interval(op.access.dims[number].position, [ranges.get(v, INT32) for v in op.positions])
    assert span is not None
    return span.within(op.extents[number] - (1 << 32), (1 << 32) - 1)


def places(make: Make, dim: Dim, operands: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """The positions of all lanes along a dim, int32 of `shape`: exact, or out of bounds (see `fits_int32`).

    Args:
      make: adds the ops.
      dim: the dim of the access.
      operands: the operands of its position: scalars, and tiles of `shape`.
      shape: the shape of the index vector, or of the tile of which the vector is a reshape.
    """
    total: Value | None = None
    for term in dim.position.terms:
        part = operands[term.operand]
        part = _digit(make, part, term) if not term.plain else part
        part = make.of("mul", part, int(wrapped(term.stride))) if term.stride != 1 else part
        part = make.broadcast(part, shape, ()) if not part.tile.shape else part
        total = part if total is None else make.of("add", total, part)
    assert total is not None
    const = int(wrapped(dim.position.const))
    return make.of("add", total, const) if const else total


def inside(make: Make, place: Value, length: int) -> Value:
    """True in the lanes whose position is in [0, length)."""
    return make.of("and", make.of("ge", place, 0), make.of("lt", place, length))


def with_dims(op: MemoryOp, dims: Sequence[Dim]) -> tuple[Access, tuple[Value, ...]]:
    """The access of an op with dims in place of its own, and the operands that the positions of the dims refer to."""
    used = sorted({term.operand for dim in dims for term in dim.position.terms})
    access = replace(op.access, dims=tuple(_renumbered(dim, used) for dim in dims))
    return access, tuple(op.positions[n] for n in used)


def _renumbered(dim: Dim, used: Sequence[int]) -> Dim:
    """The dim with its operands renumbered: operand `used[n]` becomes n."""
    terms = tuple(replace(term, operand=used.index(term.operand)) for term in dim.position.terms)
    return replace(dim, position=replace(dim.position, terms=terms))


def _digit(make: Make, x: Value, term: Term) -> Value:
    if term.div > 1:
        below = make.of("lt", make.of("rem", x, term.div), 0)
        x = make.of("sub", make.of("div", x, term.div), make.convert(below, I32))
    if term.mod:
        remainder = make.of("rem", x, term.mod)
        x = make.select(make.of("lt", remainder, 0), make.of("add", remainder, term.mod), remainder)
    return x
