"""The ops that compare or accumulate along one dim: arg-reduce, scan, linear scan, sort, top-k.

Numbers are ordered as in `jax.lax.sort`: -0 equals 0; all NaNs are equal, and greater than all numbers.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import numpy as np

from tilekern.ir.compute import ufunc
from tilekern.ir.core import Array, Op, require, require_dims
from tilekern.ir.elementwise import show
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, F32, F64, I32, TileType, accumulator, kind_of, round_to

Extreme = Literal["max", "min"]
Cumulative = Literal["sum", "prod", "max", "min", "logsumexp"]
CUMULATIVE: tuple[Cumulative, ...] = get_args(Cumulative)


def _ordered(x: Array) -> Array:
    """`x` in a dtype whose order NumPy knows, float64 for all floats."""
    return x.astype(F64) if kind_of(x.dtype) == "float" else x


@record(eq=False, kw_only=True)
class ArgReduce(Op):
    """The int32 index along `dim` of the largest or smallest element; the result lacks this dim.

    Of equal elements the first wins. The first NaN wins over all numbers.
    """

    name: ClassVar[str] = "arg_reduce"

    extreme: Extreme
    dim: int

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(self.extreme in ("max", "min"), f"no arg_reduce is named {self.extreme!r}")
        require_dims((self.dim,), tile)
        require(tile.shape[self.dim] > 0, f"arg_reduce of {tile} along dim {self.dim}, which has no element")
        return (TileType((*tile.shape[: self.dim], *tile.shape[self.dim + 1 :]), I32),)

    def evaluate(self, *operands: Array) -> Array:
        find = np.argmax if self.extreme == "max" else np.argmin
        return np.asarray(find(_ordered(operands[0]), axis=self.dim)).astype(I32)


@record(eq=False, kw_only=True)
class Scan(Op):
    """Every element combined with all before it along `dim` (behind it, if `reverse`). NaN wins in max and min.

    Floats narrower than float32 accumulate in float32, and every result is rounded once.
    """

    name: ClassVar[str] = "scan"

    monoid: Cumulative
    dim: int
    reverse: bool = False

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(self.monoid in CUMULATIVE, f"no scan is named {self.monoid!r}")
        require_dims((self.dim,), tile)
        fits = kind_of(tile.dtype) == "float" if self.monoid == "logsumexp" else tile.dtype != BOOL
        require(fits, f"scan {self.monoid} does not accept {tile}")
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        (x,) = operands
        wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
        way = slice(None, None, -1 if self.reverse else None)
        places = (*(slice(None) for _ in range(self.dim)), way)
        combine = np.logaddexp if self.monoid == "logsumexp" else ufunc(self.monoid)
        with np.errstate(all="ignore"):
            run = combine.accumulate(x[places].astype(wide), axis=self.dim, dtype=wide)[places]
            return round_to(run, x.dtype) if kind_of(x.dtype) == "float" else run


@record(eq=False, kw_only=True)
class LinearScan(Op):
    """h_i = a_i h_{i-1} + b_i along `dim` (h_{i+1}, if `reverse`), for the operands a and b; 0 comes before the first.

    Backends may multiply neighbouring factors first: if such products overflow, or a factor is not finite, results
    may be NaN.
    """

    name: ClassVar[str] = "linear_scan"

    dim: int
    reverse: bool = False

    def infer(self) -> tuple[TileType, ...]:
        factors, terms = self.tiles(2)
        require(factors == terms, f"linear_scan needs operands of one type, got {show((factors, terms))}")
        require_dims((self.dim,), terms)
        require(terms.dtype in (F32, F64), f"linear_scan does not accept {terms}")
        return (terms,)

    def evaluate(self, *operands: Array) -> Array:
        factors, terms = (np.moveaxis(x, self.dim, 0) for x in operands)
        states = np.zeros_like(terms)
        state = np.zeros(terms.shape[1:], terms.dtype)
        with np.errstate(all="ignore"):
            for i in reversed(range(len(terms))) if self.reverse else range(len(terms)):
                states[i] = state = factors[i] * state + terms[i]
        return np.moveaxis(states, 0, self.dim)


@record(eq=False, kw_only=True)
class Sort(Op):
    """Operand number `pick`, its elements along `dim` in the ascending order of the first `num_keys` operands.

    The first operand counts most. Stable: elements equal in all keys stay in order. All operands have one shape.
    """

    name: ClassVar[str] = "sort"

    dim: int
    num_keys: int = 1
    pick: int = 0

    def infer(self) -> tuple[TileType, ...]:
        tiles = self.tiles()
        require(1 <= self.num_keys <= len(tiles), f"sort of {len(tiles)} operands by {self.num_keys} keys")
        require(0 <= self.pick < len(tiles), f"sort of {len(tiles)} operands for number {self.pick}")
        require(all(t.shape == tiles[0].shape for t in tiles), f"sort needs one shape, got {show(tiles)}")
        require_dims((self.dim,), tiles[0])
        return (tiles[self.pick],)

    def evaluate(self, *operands: Array) -> Array:
        keys = [_ordered(x) for x in operands[: self.num_keys]]
        return np.take_along_axis(operands[self.pick], np.lexsort(keys[::-1], axis=self.dim), self.dim)


@record(eq=False, kw_only=True)
class TopK(Op):
    """The int32 indices along `dim` of the `k` greatest elements, the greatest first; ties in the order of indices."""

    name: ClassVar[str] = "top_k"

    dim: int
    k: int

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require_dims((self.dim,), tile)
        require(0 <= self.k <= tile.shape[self.dim], f"top_k of {self.k} elements along dim {self.dim} of {tile}")
        return (TileType((*tile.shape[: self.dim], self.k, *tile.shape[self.dim + 1 :]), I32),)

    def evaluate(self, *operands: Array) -> Array:
        # A stable sort of the reversed elements, read backwards, keeps equal elements in order.
        x = _ordered(np.flip(operands[0], self.dim))
        order = np.flip(np.lexsort([x], axis=self.dim), self.dim)
        places = (*(slice(None) for _ in range(self.dim)), slice(self.k))
        return (x.shape[self.dim] - 1 - order[places]).astype(I32)
