"""Memory: `Access` says which elements of an array a program touches; `Load` and `Store` touch them.

`Access` is what every backend reads: masks, TMA descriptors, BlockSpecs, sharding and vmap follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

from tilekern import source
from tilekern.errors import IndexingError
from tilekern.ir.core import Op, Value, require
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, I32, Kind, TileType, dtype_name, kind_of

_FARTHEST = 2**63 - 1


@record
class Term:
    """`stride` times a digit of the access's operand number `operand`: (operand // div) % mod, rounded down.

    Digits make a number in mixed radix: n = 6 * (n // 6) + n % 6. A `mod` of 0 stands for no modulus.
    """

    operand: int
    stride: int
    div: int = 1
    mod: int = 0

    @property
    def plain(self) -> bool:
        """True if the digit is the whole number."""
        return (self.div, self.mod) == (1, 0)

    @property
    def reach(self) -> int:
        """The greatest possible magnitude of the term."""
        return abs(self.stride) * (self.mod or -(-(2**31) // self.div))

    def digit(self, number: Any) -> Any:
        """The digit of a number, or of every element of an array, NumPy's or JAX's."""
        quotient = number // self.div if self.div > 1 else number
        return quotient % self.mod if self.mod else quotient


@record
class Position:
    """`const` plus a sum of terms, in elements; operands are int32 scalars (axis indices or computed values)."""

    terms: tuple[Term, ...] = ()
    const: int = 0

    def is_multiple_of(self, size: int) -> bool:
        """True if it is a multiple of a size for all operands."""
        return size > 0 and all(n % size == 0 for n in (self.const, *(term.stride for term in self.terms)))


@record
class Dim:
    """The positions of an access along one dim of the array.

    Attributes:
      kind: "block" is `size` consecutive elements from `position` on; "index" is the one element at `position`, and
        drops the dim; "gather" is an element for each lane: in it one operand of `position` is an int32 vector. "along"
        is an element for each lane of the nearest gather before it: both vectors go together, pointwise.
      position: the position of the first lane, or of each lane of a vector, in elements.
      size: the number of lanes; 1 for "index".
      in_bounds: True if it is proved that every lane is in [0, dim) whenever the access runs.
    """

    kind: Literal["block", "index", "gather", "along"]
    position: Position
    size: int = 1
    in_bounds: bool = False

    @property
    def reach(self) -> int:
        """The greatest possible magnitude of a lane's position, over all int32 operands."""
        return abs(self.position.const) + self.size + sum(term.reach for term in self.position.terms)


@record
class Access:
    """One `Dim` for each dim of the array; the lanes are the product of the dims (orthogonal indexing).

    Attributes:
      dims: the positions along each dim of the array.
      extents: the shape in which the array is seen, of as many elements in the same order; None for its own.
    """

    dims: tuple[Dim, ...]
    extents: tuple[int, ...] | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tile that is loaded or stored."""
        return tuple(self.dims[n].size for n in self.kept)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the dims that are dims of the tile."""
        return tuple(n for n, dim in enumerate(self.dims) if dim.kind in ("block", "gather"))

    @cached_property
    def lanes(self) -> tuple[int | None, ...]:
        """For each dim of the array, the dim of the tile; None for an index."""
        lane_dims: list[int | None] = []
        count, gather = 0, None
        for dim in self.dims:
            lane_dims.append({"index": None, "along": gather}.get(dim.kind, count))
            gather = count if dim.kind == "gather" else gather
            count += dim.kind in ("block", "gather")
        return tuple(lane_dims)

    @property
    def pointwise(self) -> bool:
        """True if index vectors go together."""
        return any(dim.kind == "along" for dim in self.dims)

    @property
    def in_bounds(self) -> bool:
        """True if every lane is proved to be in bounds."""
        return all(d.in_bounds for d in self.dims)

    def marked(self, in_bounds: Iterable[bool]) -> Access:
        """The same access, its dims marked as proved in bounds or not."""
        marks = zip(self.dims, in_bounds, strict=True)
        return replace(self, dims=tuple(replace(dim, in_bounds=mark) for dim, mark in marks))

    @cached_property
    def arity(self) -> int:
        """The number of operands that the positions refer to."""
        return 1 + max((t.operand for d in self.dims for t in d.position.terms), default=-1)


def _fault(dim: Dim, lanes: int | None, vectors: list[tuple[int, ...]]) -> str:
    """The reason why a dim of an access is malformed, by the shapes of its operands; "" if it is well formed."""
    if dim.kind == "along" and lanes != dim.size:
        return f"along of size {dim.size} behind no gather of that size"
    if [s for s in vectors if s] != ([(dim.size,)] if dim.kind in ("gather", "along") else []):
        return f"{dim.kind} of size {dim.size} by operands {vectors}"
    if not all(t.div > 0 and t.mod >= 0 for t in dim.position.terms):
        return f"digits need a positive divisor and modulus, got {dim.position.terms}"
    return "" if dim.size >= 0 and (dim.kind != "index" or dim.size == 1) else f"{dim.kind} of size {dim.size}"


def whole_access(shape: tuple[int, ...]) -> Access:
    """All elements of an array."""
    return Access(tuple(Dim("block", Position(), size, in_bounds=True) for size in shape))


@record(eq=False, kw_only=True)
class MemoryOp(Op):
    """Base of the ops that access memory. Operands: `leading` values, the ref first; the positions; a mask, if any."""

    pure: ClassVar[bool] = False
    leading: ClassVar[int] = 1

    access: Access
    masked: bool = False

    @property
    def ref(self) -> Value:
        """The array."""
        return self.operands[0]

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the array, as the access sees it."""
        return self.ref.ref.shape if self.access.extents is None else self.access.extents

    @property
    def positions(self) -> tuple[Value, ...]:
        """The operands that `access` refers to by number."""
        return self.operands[self.leading : self.leading + self.access.arity]

    @property
    def mask(self) -> Value | None:
        """The mask, bool of the access's shape: lanes where it is False are not accessed; None without one."""
        return self.operands[self.leading + self.access.arity] if self.masked else None

    def check_access(self) -> TileType:
        """Check the access against the ref, and return the type of the lanes."""
        access = self.access
        expected = self.leading + access.arity + self.masked + self.trailing
        require(len(self.operands) == expected, f"{self.name} takes {expected} operands, got {len(self.operands)}")
        ref = self.ref.ref
        extents = self.extents
        require(min(extents, default=0) >= 0, f"{self.name} of {ref} as {list(extents)}")
        require(prod(extents) == prod(ref.shape), f"{self.name} of {ref} as {list(extents)}, of other size")
        require(len(access.dims) == len(extents), f"{self.name} of {list(extents)} with {len(access.dims)} dims")
        positions, shape = self.positions, access.shape
        for dim, lane in zip(access.dims, access.lanes, strict=True):
            vectors = [positions[t.operand].tile.shape for t in dim.position.terms]
            fault = _fault(dim, None if lane is None else shape[lane], vectors)
            require(not fault, fault)
            self._check_reach(dim)
        for value in self.positions:
            require(value.tile.dtype == I32, f"a position must be int32, got {value.type}")
        if self.masked:
            require(self.operands[-1 - self.trailing].tile == TileType(access.shape, BOOL), "mask of the wrong type")
        return TileType(access.shape, ref.dtype)

    def _check_reach(self, dim: Dim) -> None:
        """Refuse a position that 64 bits may not hold: in 64 bits, every backend computes it exactly."""
        if dim.reach > _FARTHEST:
            with source.at(self.loc):
                raise IndexingError(
                    f"a position along a dim of {self.ref.name} may not fit 64 bits",
                    expected="numbers and constants that keep |constant| + Σ |factor| · 2³¹ below 2⁶³",
                    got=f"factors {[term.stride for term in dim.position.terms]}, constant {dim.position.const}",
                    fix="take smaller factors: an array has fewer elements",
                )

    @property
    def trailing(self) -> int:
        """The number of operands behind the mask."""
        return 0


@record(eq=False, kw_only=True)
class Load(MemoryOp):
    """The elements of an access; lanes out of bounds or masked are `fill` (a scalar, the last operand; 0 if absent)."""

    name: ClassVar[str] = "load"

    filled: bool = False

    @property
    def fill(self) -> Value | None:
        """The scalar in lanes that are not read; None for 0."""
        return self.operands[-1] if self.filled else None

    @property
    def trailing(self) -> int:
        return int(self.filled)

    def infer(self) -> tuple[TileType, ...]:
        lanes = self.check_access()
        if self.filled:
            require(self.operands[-1].tile == TileType((), lanes.dtype), f"fill of {lanes} is no scalar of its dtype")
        return (lanes,)


@record(eq=False, kw_only=True)
class WriteOp(MemoryOp):
    """Base of the ops that write a tile to the elements of an access. Operands: the ref, the tile, ..."""

    leading: ClassVar[int] = 2

    @property
    def value(self) -> Value:
        """The tile that is written."""
        return self.operands[1]

    def infer(self) -> tuple[TileType, ...]:
        lanes = self.check_access()
        require(self.ref.ref.role != "in", f"{self.name} to an input")
        require(self.value.tile == lanes, f"{self.name} of {self.value.type} to an access of {lanes}")
        return ()


@record(eq=False, kw_only=True)
class Store(WriteOp):
    """Write a tile to the elements of an access, but lanes out of bounds or masked."""

    name: ClassVar[str] = "store"

    def infer(self) -> tuple[TileType, ...]:
        require(self.ref.ref.role != "sum", "store to a sum")
        return super().infer()


AtomicKind = Literal["add", "max", "min", "and", "or", "xor"]
_BITWISE: tuple[AtomicKind, ...] = ("and", "or", "xor")
# The updates that elements of each kind of dtype take.
ATOMICS: dict[Kind, tuple[AtomicKind, ...]] = {
    "float": ("add", "max", "min"),
    "signed": ("add", "max", "min", *_BITWISE),
    "unsigned": ("add", "max", "min", *_BITWISE),
    "bool": ("max", "min", *_BITWISE),
}


@record(eq=False, kw_only=True)
class Atomic(WriteOp):
    """Combine a tile with the elements of an access, but lanes out of bounds or masked, in one step each.

    All programs may update one element, by one kind; then no program loads or stores it. The outcome of integer updates
    does not depend on the order of programs. Nor does a "sum": its contributions are added in program order.
    """

    name: ClassVar[str] = "atomic"

    kind: AtomicKind

    def infer(self) -> tuple[TileType, ...]:
        role, dtype = self.ref.ref.role, self.ref.ref.dtype
        require(role in ("zeros", "inout") or (role == "sum" and self.kind == "add"), f"atomic {self.kind} on {role}")
        require(self.kind in ATOMICS[kind_of(dtype)], f"atomic {self.kind} of {dtype_name(dtype)}")
        return super().infer()
