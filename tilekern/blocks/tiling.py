"""The amounts of work that a choice of blocks makes. `reader` reads them from the block IR.

The analytic models of targets (`on_cpu`, `on_gpu`, `on_tpu`) turn a `Tiling` into seconds. All lanes of a tile count,
also those outside of extents, for the machine computes them.

A `Tiling` is a pytree. Its leaves are the numbers that depend on blocks; `candidates` puts arrays in their place, with
an element for each choice of blocks. So all sizes here are ints or arrays of NumPy, and formulas work on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, dataclass_transform

import jax
import numpy as np

from tilekern.blocks.readings import Shift

type Number = Any
"""An int or a float, or an array of them with an element for each choice of blocks."""


@dataclass_transform(frozen_default=True)
def _pytree(*fixed: str) -> Any:
    """A frozen dataclass as a pytree, whose fields `fixed` do not depend on blocks."""

    def register(cls: type[Any]) -> type[Any]:
        record = dataclass(frozen=True)(cls)
        names = [name for name in record.__dataclass_fields__ if name not in fixed]
        return jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=list(fixed))

    return register


@_pytree("number")
class Loop:
    """The programs along a grid axis, or the iterations of a fold.

    Attributes:
      extent: elements of the axis.
      block: elements of a tile.
      number: the number of the loop in its Func.
      part: the mean part of the tiles that a fold visits; 1 for all.
    """

    extent: Number
    block: Number
    number: int
    part: float = 1.0

    @property
    def count(self) -> Number:
        """The mean number of programs or iterations."""
        return -(-self.extent // np.maximum(self.block, 1)) * self.part


@_pytree("itemsize", "is_operand", "is_carried")
class Tile:
    """The lanes of a value.

    Attributes:
      shape: the sizes of its dims.
      itemsize: bytes of a lane.
      is_operand: True if only matrix products use the value.
      is_carried: True if a loop starts with the value, or yields it: it may take the registers of the carry.
    """

    shape: tuple[Number, ...]
    itemsize: int
    is_operand: bool = False
    is_carried: bool = False

    @property
    def size(self) -> Number:
        """The number of lanes."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> Number:
        """Bytes of all lanes."""
        return self.size * self.itemsize

    @property
    def inner(self) -> Number:
        """The size of the last dim; 1 without dims."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> Number:
        """The product of all sizes but the last."""
        return math.prod(self.shape[:-1])


@_pytree("is_function", "reduces", "transposes", "turns")
class TileOp:
    """An op that computes a tile lane by lane, or combines the lanes of one.

    Attributes:
      tile: the lanes: of the result, or of the operand that is reduced, scanned or sorted.
      loops: the loops around it.
      is_function: True for one of `reader.FUNCTIONS`.
      reduces: the dims that it reduces, scans or sorts; empty for elementwise ops.
      transposes: True if the last dim of its operand is another dim of its result.
      turns: True if it gives each element of a loaded vector a row: its lanes become rows.
    """

    tile: Tile
    loops: tuple[Loop, ...]
    is_function: bool
    reduces: tuple[int, ...]
    transposes: bool
    turns: bool = False

    @property
    def times(self) -> Number:
        """The number of times that all programs together run it."""
        return times(self.loops)

    @property
    def reduces_inner(self) -> bool:
        """True if it combines lanes of the last dim."""
        return len(self.tile.shape) - 1 in self.reduces


@_pytree("itemsizes")
class Product:
    """A matrix product of tiles, [batch, m, k] × [batch, k, n].

    Attributes:
      batch, m, n, k: its sizes.
      loops: the loops around it.
      itemsizes: bytes of an element of the left operand and of the right one.
    """

    batch: Number
    m: Number
    n: Number
    k: Number
    loops: tuple[Loop, ...]
    itemsizes: tuple[int, int]

    @property
    def times(self) -> Number:
        """The number of times that all programs together run it."""
        return times(self.loops)


@_pytree(
    *("array", "extents", "kinds", "aligned", "itemsize", "is_operand", "stores", "shares_rows", "shift", "passes"),
    *("moved_by", "streamed_by", "refetched_by", "placed_by"),
)
class TileAccess:
    """A load, a store or an update of a tile of an array.

    Attributes:
      sizes: lanes along each dim of the array.
      loops: the loops around it.
      rows_of_use: the number of rows for which a loaded tile is read again: it is broadcast along so many.
      passes: the number of steps that read a loaded tile.
      moved_by: for each loop True if the position of the tile depends on the loop's index.
      streamed_by: for each loop True if the position along the array's last dim depends on the loop's index.
      refetched_by: as `moved_by`, but the index of a fold counts as one that depends on all that the fold reads. The
        constants of `on_tpu` were fitted with it.
      placed_by: as `moved_by`, but the index of a fold counts as one that depends on the fold alone: True for a loop
        around a fold only if all tiles of the fold move with it.
      array: the number of the param.
      extents: the sizes of the array.
      kinds: the kinds of the dims of the access, as in `ir.memory.Dim`.
      aligned: for each dim True if the position is a multiple of the size.
      itemsize: bytes of an element.
      is_operand: True if only matrix products use the tile.
      stores: True for a store or an update.
      shares_rows: True if several accesses at the same place have a part of the last dim each, and all of it together.
      shift: the distance to an earlier access of the array; None without a constant one.
    """

    sizes: tuple[Number, ...]
    loops: tuple[Loop, ...]
    rows_of_use: Number
    passes: int
    moved_by: tuple[bool, ...]
    streamed_by: tuple[bool, ...]
    refetched_by: tuple[bool, ...]
    placed_by: tuple[bool, ...]
    array: int
    extents: tuple[int, ...]
    kinds: tuple[str, ...]
    aligned: tuple[bool, ...]
    itemsize: int
    is_operand: bool
    stores: bool
    shares_rows: bool
    shift: Shift | None

    @property
    def times(self) -> Number:
        """The number of times that all programs together run it."""
        return times(self.loops)

    @property
    def path(self) -> tuple[int, ...]:
        """The numbers of the loops."""
        return tuple(loop.number for loop in self.loops)

    @property
    def tile(self) -> Tile:
        """Its lanes."""
        lanes = tuple(n for n, kind in zip(self.sizes, self.kinds, strict=True) if kind in ("block", "gather"))
        return Tile(lanes, self.itemsize)

    @property
    def array_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.extents) * self.itemsize

    @property
    def run(self) -> Number:
        """Elements that lie side by side: of the last dim, and of the one before it if the tile has all of a row."""
        return self._run(self.sizes)

    @property
    def run_of_rows(self) -> Number:
        """`run`, with all of the last dim if the accesses at this place have it together."""
        return self._run((*self.sizes[:-1], self.extents[-1])) if self.shares_rows else self.run

    def _run(self, sizes: Sequence[Number]) -> Number:
        run, whole = 1, True
        for size, extent, kind in reversed(list(zip(sizes, self.extents, self.kinds, strict=True))):
            lanes = 1 if kind in ("gather", "along") else np.minimum(size, extent)
            run = run * np.where(whole, lanes, 1)
            whole = whole & (lanes >= extent)
        return np.maximum(run, 1)

    @property
    def gathers(self) -> bool:
        """True if an index vector chooses the elements of the last dim."""
        return bool(self.kinds) and self.kinds[-1] in ("gather", "along")


@_pytree()
class Held:
    """The tiles that a program holds from one step to the next while it runs a block of ops.

    Attributes:
      steps: for each step the tiles that a later step uses.
      buffers: for each step the tiles that are in memory, on a machine that computes lane by lane: results that exist
        only as a whole, and tiles that take longer to compute again than to load.
      carries: the arguments of the block.
      inner: the same of the blocks inside of it.
    """

    steps: tuple[tuple[Tile, ...], ...]
    buffers: tuple[tuple[Tile, ...], ...]
    carries: tuple[Tile, ...]
    inner: tuple[Held, ...]

    @property
    def bytes(self) -> Number:
        """Bytes of all that is held at once, at most."""
        most = greatest(sum((tile.bytes for tile in tiles), start=0) for tiles in self.steps)
        return most + sum(tile.bytes for tile in self.carries) + greatest(held.bytes for held in self.inner)

    @property
    def bytes_of_buffers(self) -> Number:
        """Bytes of all that is in memory at once, at most, on a machine that computes lane by lane."""
        most = greatest(sum((tile.bytes for tile in tiles), start=0) for tiles in self.buffers)
        inner = greatest(held.bytes_of_buffers for held in self.inner)
        return most + sum(tile.bytes for tile in self.carries) + inner

    @property
    def bytes_of_registers(self) -> Number:
        """`bytes` on a machine that has operands of matrix products elsewhere, and each carry once."""
        steps = [[tile for tile in tiles if not (tile.is_operand or tile.is_carried)] for tiles in self.steps]
        most = greatest(sum((tile.bytes for tile in tiles), start=0) for tiles in steps)
        inner = greatest(held.bytes_of_registers for held in self.inner)
        return most + sum(tile.bytes for tile in self.carries) + inner


@_pytree("arrays")
class Tiling:
    """The work of all programs of a Func.

    Attributes:
      grid: the axes of the grid.
      folds: for each fold the loops around it, and itself as the last one.
      ops: the ops that compute lane by lane.
      products: the matrix products.
      accesses: loads, stores and updates.
      held: the tiles that a program holds.
      arrays: bytes of all arrays, each once.
    """

    grid: tuple[Loop, ...]
    folds: tuple[tuple[Loop, ...], ...]
    ops: tuple[TileOp, ...]
    products: tuple[Product, ...]
    accesses: tuple[TileAccess, ...]
    held: Held
    arrays: int

    @property
    def programs(self) -> Number:
        """The number of programs."""
        return times(self.grid)

    @property
    def iterations(self) -> Number:
        """Iterations of all folds in all programs together."""
        return sum(times(loops) for loops in self.folds)


def times(loops: Sequence[Loop]) -> Number:
    """The number of times that something inside of loops runs."""
    return math.prod((loop.count for loop in loops), start=1.0)


def greatest(numbers: Iterable[Number]) -> Number:
    """The largest number, by choice of blocks; 0 if there is none."""
    greatest: Number = 0
    for number in numbers:
        greatest = np.maximum(greatest, number)
    return greatest
