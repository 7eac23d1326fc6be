"""The amounts of work that a choice of blocks makes: read from the block IR, without lowering it.

The analytic models of targets (`on_cpu`, `on_gpu`, `on_tpu`) turn a `Tiling` into seconds. All lanes of a tile count,
also those outside of extents, for the machine computes them.

A `Tiling` is a pytree. Its leaves are the numbers that depend on blocks; `candidates` puts arrays in their place, with
an element for each choice of blocks. So all sizes here are ints or arrays of NumPy, and formulas work on both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

import jax
import numpy as np

from tilekern.ir.analysis.costs import TRANSCENDENTAL
from tilekern.ir.analysis.iterations import Iterations
from tilekern.ir.compute import Constant, Dot, Reduce
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import MemoryOp
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Transpose
from tilekern.ir.types import TileType

type Number = Any
"""An int or a float, or an array of them with an element for each choice of blocks."""

_WHOLE = (Dot, Sort, TopK, Scan, LinearScan, Fold, While)
"""Ops that read their operands from memory, not lane by lane while these are computed."""
_AFTER = (*_WHOLE, Reduce, ArgReduce, Switch)
"""Ops whose result exists only after the last element of their operands."""

FUNCTIONS = TRANSCENDENTAL - {"sqrt", "rsqrt"}
"""Elementwise functions of some ten or twenty instructions."""


@dataclass_transform(frozen_default=True)
def _pytree(*fixed: str) -> Any:
    """A frozen dataclass as a pytree, whose fields `fixed` do not depend on blocks."""

    def register(cls: type[Any]) -> type[Any]:
        record = dataclass(frozen=True)(cls)
        names = [name for name in record.__dataclass_fields__ if name not in fixed]
        return jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=list(fixed))

    return register


@_pytree()
class Loop:
    """The programs along a grid axis, or the iterations of a fold.

    Attributes:
      extent: elements of the axis.
      block: elements of a tile.
      part: the mean part of the tiles that a fold visits; 1 for all.
    """

    extent: Number
    block: Number
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


@_pytree("is_function", "reduces", "transposes")
class TileOp:
    """An op that computes a tile lane by lane, or combines the lanes of one.

    Attributes:
      tile: the lanes: of the result, or of the operand that is reduced, scanned or sorted.
      loops: the loops around it.
      is_function: True for one of `FUNCTIONS`.
      reduces: the dims that it reduces, scans or sorts; empty for elementwise ops.
      transposes: True if the last dim of its operand is another dim of its result.
    """

    tile: Tile
    loops: tuple[Loop, ...]
    is_function: bool
    reduces: tuple[int, ...]
    transposes: bool

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


@_pytree("array", "extents", "kinds", "aligned", "itemsize", "moved_by")
class TileAccess:
    """A load, a store or an update of a tile of an array.

    Attributes:
      sizes: lanes along each dim of the array.
      loops: the loops around it.
      moved_by: for each loop True if the position of the tile depends on the loop's index.
      array: the number of the param.
      extents: the sizes of the array.
      kinds: the kinds of the dims of the access, as in `ir.memory.Dim`.
      aligned: for each dim True if the position is a multiple of the size.
      itemsize: bytes of an element.
    """

    sizes: tuple[Number, ...]
    loops: tuple[Loop, ...]
    moved_by: tuple[bool, ...]
    array: int
    extents: tuple[int, ...]
    kinds: tuple[str, ...]
    aligned: tuple[bool, ...]
    itemsize: int

    @property
    def times(self) -> Number:
        """The number of times that all programs together run it."""
        return times(self.loops)

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
        run, whole = 1, True
        for size, extent, kind in reversed(list(zip(self.sizes, self.extents, self.kinds, strict=True))):
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
      carries: the arguments of the block.
      inner: the same of the blocks inside of it.
    """

    steps: tuple[tuple[Tile, ...], ...]
    carries: tuple[Tile, ...]
    inner: tuple[Held, ...]

    @property
    def bytes(self) -> Number:
        """Bytes of all that is held at once, at most."""
        most = greatest(sum((tile.bytes for tile in tiles), start=0) for tiles in self.steps)
        return most + sum(tile.bytes for tile in self.carries) + greatest(held.bytes for held in self.inner)

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


# --- reading a Func ---------------------------------------------------------------------------------------------------


def tiling(func: Func) -> Tiling:
    """The work that a Func's blocks make."""
    products = [op for op in func.walk() if isinstance(op, Dot)]
    uses = Counter(value for op in func.walk() for value in op.operands)
    uses.subtract(value for op in products for value in op.operands)
    operands = {value for op in products for value in op.operands if not uses[value]}
    loops = [op for op in func.walk() if isinstance(op, Fold | While)]
    carried = {value for op in loops for values in (op.operands, op.regions[-1].results) for value in values}
    reader = _Reader(Iterations(func), {param: n for n, param in enumerate(func.params)}, operands, carried)
    reader.moved_by |= {index: frozenset({n}) for n, index in enumerate(func.body.args)}
    grid = tuple(Loop(axis.extent, axis.block) for axis in func.axes)
    held = reader.block(func.body, grid)
    arrays = sum(math.prod(p.ref.shape) * p.ref.dtype.itemsize for p in func.params)
    parts = map(tuple, (reader.folds, reader.ops, reader.products, reader.accesses))
    return Tiling(grid, *parts, held, arrays)


@dataclass
class _Reader:
    of_folds: Iterations
    arrays: Mapping[Value, int]
    operands: set[Value]  # values that only matrix products use
    carried: set[Value]  # values that a loop starts with, or yields
    folds: list[tuple[Loop, ...]] = field(default_factory=list[tuple[Loop, ...]])
    ops: list[TileOp] = field(default_factory=list[TileOp])
    products: list[Product] = field(default_factory=list[Product])
    accesses: list[TileAccess] = field(default_factory=list[TileAccess])
    # By value the numbers of the loops around it that it depends on; a missing value depends on none.
    moved_by: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])

    def block(self, block: Block, loops: tuple[Loop, ...]) -> Held:
        """Read the ops of a block inside of loops."""
        inner = [held for op in block.ops for held in self._op(op, loops)]
        steps, carries = self._steps(block)
        return Held(steps, carries, tuple(inner))

    def _op(self, op: Op, loops: tuple[Loop, ...]) -> list[Held]:
        by = self._loops_of(op.uses())
        # An iteration of a loop depends on all iterations before it.
        inside_by = by | {len(loops)} if isinstance(op, Fold) else by
        self.moved_by |= dict.fromkeys((a for region in op.regions for a in region.args), inside_by)
        self.moved_by |= dict.fromkeys(op.results, by)
        match op:
            case Fold():
                inside = (*loops, Loop(op.axis.extent, op.axis.block, self._part(op)))
                self.folds.append(inside)
                return [self.block(op.body, inside)]
            case While() | Switch():
                inside = loops if isinstance(op, While | Hoist) else (*loops, Loop(1, 1, 1 / len(op.regions)))
                return [self.block(region, inside) for region in op.regions]
            case Dot():
                self.products.append(_product(op, loops))
            case MemoryOp():
                moving = self._loops_of(op.positions)
                moved_by = tuple(n in moving for n in range(len(loops)))
                self.accesses.append(_access(op, loops, moved_by, self.arrays[op.ref]))
            case _ if not isinstance(op, Constant) and op.results and op.results[0].tile.shape:
                self.ops.append(self._lanes(op, loops))
            case _:
                pass
        return []

    def _lanes(self, op: Op, loops: tuple[Loop, ...]) -> TileOp:
        dims: tuple[int, ...] = ()
        if isinstance(op, Reduce):
            dims = op.dims
        elif isinstance(op, ArgReduce | Scan | LinearScan | Sort | TopK):
            dims = (op.dim,)
        moves = isinstance(op, Transpose) and op.permutation[-1] != len(op.permutation) - 1
        function = isinstance(op, Elementwise) and op.function in FUNCTIONS
        return TileOp(self._tile(op.operands[0] if dims else op.results[0]), loops, function, dims, moves)

    def _steps(self, block: Block) -> tuple[tuple[tuple[Tile, ...], ...], tuple[Tile, ...]]:
        """For each step of a block the tiles that it holds for later steps, and the block's arguments.

        A step is all that can be computed in one pass over the lanes.
        """
        step, last = dict[Value, int](), dict[Value, int]()
        for op in block.ops:
            used = [v for v in op.uses() if v in step]
            here = max((step[v] for v in used), default=0)
            for value in used:
                last[value] = max(last.get(value, 0), here + isinstance(op, _WHOLE))
            step |= dict.fromkeys(op.results, here + isinstance(op, _AFTER))
        end = max(step.values(), default=0) + 1
        last |= {value: end for value in block.results if value in step}
        held = tuple(
            tuple(self._tile(value) for value, first in step.items() if first < at <= last.get(value, 0))
            for at in range(1, end + 1)
        )
        tiles = [value for value in block.args if isinstance(value.type, TileType) and value.tile.shape]
        return held, tuple(map(self._tile, tiles))

    def _tile(self, value: Value) -> Tile:
        return Tile(value.tile.shape, value.tile.dtype.itemsize, value in self.operands, value in self.carried)

    def _loops_of(self, values: Iterable[Value]) -> frozenset[int]:
        """The numbers of the loops that any of some values depends on."""
        return frozenset[int]().union(*(self.moved_by.get(value, frozenset()) for value in values))

    def _part(self, op: Fold) -> float:
        """The mean part of the tiles that a fold visits."""
        axis = op.axis
        return float(self.of_folds.of(op) * axis.block / axis.extent) if axis.extent else 0.0


def _product(op: Dot, loops: tuple[Loop, ...]) -> Product:
    lhs, rhs = op.tiles(2)
    batch, k = (math.prod(lhs.shape[d] for d in dims) for dims in (op.batch[0], op.contract[0]))
    m, n = (math.prod(op.operands[side].tile.shape[d] for d in op.free(side)) for side in (0, 1))
    return Product(batch, m, n, k, loops, (lhs.dtype.itemsize, rhs.dtype.itemsize))


def _access(op: MemoryOp, loops: tuple[Loop, ...], moved_by: tuple[bool, ...], array: int) -> TileAccess:
    dims = op.access.dims
    return TileAccess(
        sizes=tuple(dim.size for dim in dims),
        loops=loops,
        moved_by=moved_by,
        array=array,
        extents=tuple(op.extents),
        kinds=tuple(dim.kind for dim in dims),
        aligned=tuple(dim.kind != "block" or dim.position.is_multiple_of(dim.size) for dim in dims),
        itemsize=op.ref.ref.dtype.itemsize,
    )
