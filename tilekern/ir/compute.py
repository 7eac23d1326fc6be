"""Ops that compute and have no row in the elementwise table: constant, select, convert, bitcast, dot, reduce."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast, get_args

import ml_dtypes
import numpy as np

from tilekern.ir.core import Array, Op, require, require_dims
from tilekern.ir.elementwise import TABLE
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, DType, TileType, accumulator, kind_of, round_to

Precision = Literal["ieee", "tf32", "bf16", "bf16x3", "bf16x6"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32", "bf16", "bf16x3", "bf16x6")


@record(eq=False, kw_only=True)
class Constant(Op):
    """A known tile: the elements of `array`, broadcast to `shape` (so a splat takes one element)."""

    name: ClassVar[str] = "constant"

    array: Array
    shape: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        require(not self.operands, "constant takes no operand")
        splat_or_whole = self.array.shape in ((), self.shape)
        require(splat_or_whole, f"a constant of shape {self.shape} from an array of shape {self.array.shape}")
        return (TileType(self.shape, self.array.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return np.broadcast_to(self.array, self.shape)


def splat(value: Any, tile: TileType, **fields: Any) -> Constant:
    """The constant whose elements all are `value`."""
    return Constant(array=np.asarray(value, tile.dtype), shape=tile.shape, **fields)


@record(eq=False, kw_only=True)
class Select(Op):
    """The second operand in lanes where the first operand (bool) is True, else the third; all have one shape."""

    name: ClassVar[str] = "select"

    def infer(self) -> tuple[TileType, ...]:
        predicate, on_true, on_false = self.tiles(3)
        require(predicate.dtype == BOOL, f"select needs a bool predicate, got {predicate}")
        require(on_true == on_false, f"select needs two tiles of one type, got {on_true} and {on_false}")
        require(predicate.shape == on_true.shape, f"select by {predicate} of {on_true}")
        return (on_true,)

    def evaluate(self, *operands: Array) -> Array:
        return np.where(*operands)


@record(eq=False, kw_only=True)
class Convert(Op):
    """Cast to `dtype`: to floats rounding to nearest even, float to integer toward zero and saturating, NaN to 0."""

    name: ClassVar[str] = "convert"

    dtype: DType

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        return (TileType(tile.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        (x,) = operands
        if self.dtype == BOOL:
            return x != np.zeros((), x.dtype)
        with np.errstate(all="ignore"):
            if kind_of(self.dtype) == "float":
                return round_to(x, self.dtype)
            if kind_of(x.dtype) != "float":
                return x.astype(self.dtype)
        limits = ml_dtypes.iinfo(self.dtype)
        wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        # float64 cannot hold 2^63 - 1: compare first, then convert the numbers in range.
        below, above = wide < float(limits.min), wide >= float(limits.max)
        inside = np.where(below | above, 0.0, wide).astype(self.dtype)
        return np.where(below, limits.min, np.where(above, limits.max, inside)).astype(self.dtype)


@record(eq=False, kw_only=True)
class Bitcast(Op):
    """The same bits as elements of `dtype`, which has the same width; not from or to bool."""

    name: ClassVar[str] = "bitcast"

    dtype: DType

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        fits = BOOL not in (tile.dtype, self.dtype) and tile.dtype.itemsize == self.dtype.itemsize
        require(fits, f"bitcast of {tile} to {TileType(tile.shape, self.dtype)}")
        return (TileType(tile.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0].view(self.dtype)


@record(eq=False, kw_only=True)
class Dot(Op):
    """Contract two tiles: `jax.lax.dot_general` with accumulation in `accumulator(dtype)`.

    Result dims: the batch dims, then the free dims of the left operand, then the free dims of the right one. Products
    of float32 operands are exact float32 products unless `precision` names a cheaper way.
    """

    name: ClassVar[str] = "dot"

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    precision: Precision = "ieee"

    def infer(self) -> tuple[TileType, ...]:
        lhs, rhs = self.tiles(2)
        require(lhs.dtype == rhs.dtype, f"dot needs operands of one dtype, got {lhs} and {rhs}")
        require(self.precision in PRECISIONS, f"dot precision {self.precision!r} is none of {PRECISIONS}")
        require_dims((*self.contract[0], *self.batch[0]), lhs)
        require_dims((*self.contract[1], *self.batch[1]), rhs)
        for left, right in (self.contract, self.batch):
            sizes = [lhs.shape[d] for d in left], [rhs.shape[d] for d in right]
            require(sizes[0] == sizes[1], f"dot of {lhs} and {rhs} pairs dims {left} of sizes {sizes[0]} with {right}")
        shape = (
            *(lhs.shape[d] for d in self.batch[0]),
            *(lhs.shape[d] for d in self.free(0)),
            *(rhs.shape[d] for d in self.free(1)),
        )
        return (TileType(shape, accumulator(lhs.dtype)),)

    def free(self, side: Literal[0, 1]) -> tuple[int, ...]:
        """The dims of one operand that are neither contracted nor batch."""
        taken = (*self.contract[side], *self.batch[side])
        return tuple(d for d in range(len(self.operands[side].tile.shape)) if d not in taken)

    def evaluate(self, *operands: Array) -> Array:
        dtype = self.result.tile.dtype
        sides: list[Array] = []
        for side, x in zip((0, 1), operands, strict=True):
            free, batch, contract = self.free(side), self.batch[side], self.contract[side]
            inner = (free, contract) if side == 0 else (contract, free)
            arranged = _cheapen(x, self.precision).astype(dtype).transpose(*batch, *inner[0], *inner[1])
            sizes = [int(np.prod([x.shape[d] for d in dims], dtype=np.int64)) for dims in inner]
            sides.append(arranged.reshape(*(x.shape[d] for d in batch), *sizes))
        with np.errstate(all="ignore"):
            return np.matmul(sides[0], sides[1]).reshape(self.result.tile.shape)


def _cheapen(x: Array, precision: Precision) -> Array:
    """Float32 operands rounded as a precision allows; a split into several bf16 terms counts as exact."""
    if x.dtype != np.float32 or precision in ("ieee", "bf16x3", "bf16x6"):
        return x
    if precision == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    # tf32 keeps 10 bits of the fraction: add half of the 13 dropped bits' range, to nearest even, then cut.
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(x), (rounded & np.uint32(0xFFFFE000)).view(np.float32), x)


Monoid = Literal["sum", "prod", "max", "min", "and", "or", "xor"]
MONOIDS: tuple[Monoid, ...] = get_args(Monoid)

_FUNCTIONS = {"sum": "add", "prod": "mul"}
_LOGICAL = {"max": "or", "min": "and"}


def combining(monoid: str) -> str:
    """The elementwise function that combines two elements; atomic updates are named by it."""
    return _FUNCTIONS.get(monoid, monoid)


def on_bools(monoid: str) -> str:
    """The name of a monoid on bools, in terms of logic: `max` is `or`, `min` is `and`."""
    return _LOGICAL.get(monoid, monoid)


def ufunc(monoid: str) -> np.ufunc:
    """The NumPy function that combines two elements."""
    return cast(np.ufunc, TABLE[combining(monoid)].meaning)


def identity(monoid: Monoid | Literal["add"], dtype: DType) -> Any:
    """The element that leaves every other element unchanged under a monoid, or under an atomic update."""
    if monoid in ("sum", "add", "or", "xor"):
        return np.zeros((), dtype)
    if monoid == "prod":
        return np.ones((), dtype)
    kind = kind_of(dtype)
    if kind == "bool":
        return np.asarray(monoid != "max", dtype)
    if monoid == "and":
        return np.invert(np.zeros((), dtype))
    if kind == "float":
        has_inf = bool(np.isinf(np.asarray(np.inf).astype(dtype)))
        bound = np.inf if has_inf else float(cast(Any, ml_dtypes.finfo(dtype)).max)
        return np.asarray(-bound if monoid == "max" else bound).astype(dtype)
    limits = ml_dtypes.iinfo(dtype)
    return np.asarray(limits.min if monoid == "max" else limits.max, dtype)


@record(eq=False, kw_only=True)
class Reduce(Op):
    """Combine all elements along `dims` with `monoid`; the result lacks these dims. NaN wins in max and min.

    Sums and products of floats narrower than float32 accumulate in float32 and round once.
    """

    name: ClassVar[str] = "reduce"

    monoid: Monoid
    dims: tuple[int, ...]

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(self.monoid in MONOIDS, f"no reduction is named {self.monoid!r}")
        require_dims(self.dims, tile)
        logical = self.monoid in ("and", "or", "xor")
        fits = kind_of(tile.dtype) != "float" if logical else tile.dtype != BOOL or self.monoid in ("max", "min")
        require(fits, f"reduce {self.monoid} does not accept {tile}")
        shape = tuple(n for d, n in enumerate(tile.shape) if d not in self.dims)
        return (TileType(shape, tile.dtype),)

    def evaluate(self, *operands: Array) -> Array:
        (x,) = operands
        wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
        with np.errstate(all="ignore"):
            start = identity(self.monoid, x.dtype).astype(wide)
            return ufunc(self.monoid).reduce(x.astype(wide), axis=self.dims, initial=start).astype(x.dtype)
