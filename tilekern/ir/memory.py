"""Memory: `Access` says which elements of an array a program touches; `Load` and `Store` touch them.

`Access` is what every backend reads: masks, TMA descriptors, BlockSpecs, sharding and vmap follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from tilekern.ir.core import Op, Value, require
from tilekern.ir.types import BOOL, I32, TileType


@dataclass(frozen=True)
class Term:
    """`stride` times the access's operand number `operand`."""

    operand: int
    stride: int


@dataclass(frozen=True)
class Position:
    """`const` plus a sum of terms, in elements; operands are int32 scalars (axis indices or computed values)."""

    terms: tuple[Term, ...] = ()
    const: int = 0


@dataclass(frozen=True)
class Dim:
    """What an access touches along one dim of the array.

    Attributes:
      kind: "block" is `size` consecutive elements from `position` on; "index" is the one element at `position`, and
        drops the dim; "gather" is an element for each lane: in it one operand of `position` is an int32 vector.
      position: where, in elements.
      size: the number of lanes; 1 for "index".
      in_bounds: proved: every lane is in [0, dim) whenever the access runs.
    """

    kind: Literal["block", "index", "gather"]
    position: Position
    size: int = 1
    in_bounds: bool = False


@dataclass(frozen=True)
class Access:
    """One `Dim` for each dim of the array; the lanes are the product of the dims (orthogonal indexing)."""

    dims: tuple[Dim, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tile that is loaded or stored."""
        return tuple(d.size for d in self.dims if d.kind != "index")

    @property
    def in_bounds(self) -> bool:
        """Whether every lane is proved to be in bounds."""
        return all(d.in_bounds for d in self.dims)

    @property
    def arity(self) -> int:
        """How many operands the positions refer to."""
        return 1 + max((t.operand for d in self.dims for t in d.position.terms), default=-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryOp(Op):
    """Base of the ops that touch memory. Operands: the ref, what `leading` counts, the positions', then a mask."""

    pure: ClassVar[bool] = False
    leading: ClassVar[int] = 1

    access: Access
    masked: bool = False

    @property
    def ref(self) -> Value:
        """The array."""
        return self.operands[0]

    @property
    def positions(self) -> tuple[Value, ...]:
        """The operands that `access` refers to by number."""
        return self.operands[self.leading : self.leading + self.access.arity]

    @property
    def mask(self) -> Value | None:
        """Which lanes are touched at all, bool of the access's shape."""
        return self.operands[self.leading + self.access.arity] if self.masked else None

    def check_access(self) -> TileType:
        """Check the access against the ref, and return the type of the lanes."""
        access = self.access
        expected = self.leading + access.arity + self.masked + self.trailing
        require(len(self.operands) == expected, f"{self.name} takes {expected} operands, got {len(self.operands)}")
        ref = self.ref.ref
        require(len(access.dims) == len(ref.shape), f"{self.name} of {ref} with {len(access.dims)} dims")
        for dim in access.dims:
            vectors = [self.positions[t.operand].tile.shape for t in dim.position.terms]
            wanted = [(dim.size,)] if dim.kind == "gather" else []
            require([s for s in vectors if s] == wanted, f"{dim.kind} of size {dim.size} by operands {vectors}")
            require(dim.size >= 0 and (dim.kind != "index" or dim.size == 1), f"{dim.kind} of size {dim.size}")
        for value in self.positions:
            require(value.tile.dtype == I32, f"a position must be int32, got {value.type}")
        if self.masked:
            require(self.operands[-1 - self.trailing].tile == TileType(access.shape, BOOL), "mask of the wrong type")
        return TileType(access.shape, ref.dtype)

    @property
    def trailing(self) -> int:
        """How many operands follow the mask."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Load(MemoryOp):
    """The elements of an access; lanes out of bounds or masked are `fill` (a scalar, the last operand; 0 if absent)."""

    name: ClassVar[str] = "load"

    filled: bool = False

    @property
    def fill(self) -> Value | None:
        """What stands in lanes that are not read."""
        return self.operands[-1] if self.filled else None

    @property
    def trailing(self) -> int:
        return int(self.filled)

    def infer(self) -> tuple[TileType, ...]:
        lanes = self.check_access()
        if self.filled:
            require(self.operands[-1].tile == TileType((), lanes.dtype), f"fill of {lanes} is no scalar of its dtype")
        return (lanes,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Store(MemoryOp):
    """Write a tile to the elements of an access, but lanes out of bounds or masked. Operands: the ref, the tile, ..."""

    name: ClassVar[str] = "store"
    leading: ClassVar[int] = 2

    @property
    def value(self) -> Value:
        """What is written."""
        return self.operands[1]

    def infer(self) -> tuple[TileType, ...]:
        lanes = self.check_access()
        require(self.ref.ref.role != "in", "store to an input")
        require(self.value.tile == lanes, f"store of {self.value.type} to an access of {lanes}")
        return ()
