"""What a program sees of an array along each dim: how an access of the block IR becomes a block of a Pallas operand.

    at        one place, known before the program runs   → the dim is squeezed, the index map finds the place
    tiled     a whole tile of a dim cut into tiles       → a block, the index map finds the tile
    static    known places                               → all of the dim is in VMEM, sliced at known places
    aligned   a tile of a dim, its number computed       → all of the dim is in VMEM, sliced at multiples of the tile
    rows      any places                                 → all of the dim is in VMEM, row by row

An input has an operand for each different way of seeing it. All accesses to an output see it in one way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Dim, MemoryOp, Position
from tilekern.lower.mosaic.plan.scalars import Scalars

Kind = Literal["at", "tiled", "static", "aligned", "rows"]


@dataclass(frozen=True)
class Role:
    """How one dim of an array is seen.

    Attributes:
      kind: see the module.
      size: elements of a tile, of "tiled" and "aligned".
      key: what the place is computed from, of "at" and "tiled".
      position, operands: the place itself; equal keys mean equal places.
    """

    kind: Kind
    size: int = 0
    key: Hashable = None
    position: Position = field(default=Position(), compare=False)
    operands: tuple[Value, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Window:
    """How an access sees an array: a role for each of its dims."""

    param: Value
    roles: tuple[Role, ...]


def window_of(op: MemoryOp, scalars: Scalars) -> Window:
    """The narrowest window through which an access can be made."""
    shape = op.ref.ref.shape
    pairs = zip(op.access.dims, shape, strict=True)
    return Window(op.ref, tuple(_role(dim, length, op, scalars) for dim, length in pairs))


def _role(dim: Dim, length: int, op: MemoryOp, scalars: Scalars) -> Role:
    position = dim.position
    if dim.kind == "gather" or length == 0:
        return Role("rows") if length else Role("static")
    if not position.terms:
        return Role("static")
    key = scalars.position_key(position, op.positions)
    if dim.kind == "index":
        return Role("rows") if key is None else Role("at", 1, key, position, op.positions)
    if not is_aligned(position, dim.size):
        return Role("rows")
    if key is None:
        return Role("aligned", dim.size)
    return Role("tiled", dim.size, key, position, op.positions)


def is_aligned(position: Position, size: int) -> bool:
    """Whether a position is a multiple of a tile's size."""
    return size > 0 and all(n % size == 0 for n in (position.const, *(t.stride for t in position.terms)))


def merge(windows: Sequence[Window]) -> Window:
    """The window through which accesses of several windows can be made."""
    first = windows[0]
    roles = tuple(_merged(roles) for roles in zip(*(w.roles for w in windows), strict=True))
    return Window(first.param, roles)


def _merged(roles: Sequence[Role]) -> Role:
    if len(set(roles)) == 1:
        return roles[0]
    kinds = {r.kind for r in roles}
    sizes = {r.size for r in roles}
    if kinds <= {"tiled", "aligned"} and len(sizes) == 1:
        return Role("aligned", roles[0].size)
    return Role("rows")


def opened(window: Window, scalars: Scalars, axes: frozenset[Value] | None = None) -> Window:
    """The window with all of the array in VMEM; given axes, all of the dims whose places depend on any of them."""
    return Window(
        window.param,
        tuple(opened_role(role) if axes is None or axes & _axes(role, scalars) else role for role in window.roles),
    )


def opened_role(role: Role) -> Role:
    """The role with all of the dim in VMEM."""
    return {"tiled": Role("aligned", role.size), "at": Role("rows")}.get(role.kind, role)


def axes_of(window: Window, scalars: Scalars) -> frozenset[Value]:
    """The indices, of the grid and of loops that are known, on which it depends what a window shows."""
    return frozenset[Value]().union(*(_axes(role, scalars) for role in window.roles))


def _axes(role: Role, scalars: Scalars) -> frozenset[Value]:
    return frozenset[Value]().union(*(scalars.axes(role.operands[t.operand]) for t in role.position.terms))


def tiles(length: int, size: int) -> int:
    """How many tiles a dim has; at least one, for an empty one is never read."""
    return max(1, cdiv(length, size))
