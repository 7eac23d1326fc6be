"""The `Tiling` of a Func, read from the block IR without lowering it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilekern.blocks.readings import Readings, Shift, row_parts, shift
from tilekern.blocks.tiling import Held, Loop, Product, Tile, TileAccess, TileOp, Tiling
from tilekern.ir.analysis.costs import TRANSCENDENTAL
from tilekern.ir.analysis.iterations import Iterations
from tilekern.ir.compute import Constant, Convert, Dot, Reduce
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp, Position
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import TileType

_WHOLE = (Dot, Sort, TopK, Scan, LinearScan, Fold, While)
"""Ops that read their operands from memory, not lane by lane while these are computed."""
_AFTER = (*_WHOLE, Reduce, ArgReduce, Switch)
"""Ops whose result exists only after the last element of their operands."""

_FREE = (Constant, Iota, Load, Broadcast, Reshape, Slice)
"""Ops that only select elements."""

_CHEAP = 2
"""Operations for an element, up to which computing a tile again takes no longer than to store and load it."""

FUNCTIONS = TRANSCENDENTAL - {"sqrt", "rsqrt"}
"""Elementwise functions of some ten or twenty instructions."""


def tiling(func: Func) -> Tiling:
    """The work that a Func's blocks make."""
    products = [op for op in func.walk() if isinstance(op, Dot)]
    uses = Counter(value for op in func.walk() for value in op.operands)
    uses.subtract(value for op in products for value in op.operands)
    operands = {value for op in products for value in op.operands if not uses[value]}
    loops = [op for op in func.walk() if isinstance(op, Fold | While)]
    carried = {value for op in loops for values in (op.operands, op.regions[-1].results) for value in values}
    results = {value for op in loops for value in op.results}
    numbers = {param: n for n, param in enumerate(func.params)}
    without_buffer = carried | results | _summands(func)
    reader = _Reader(Iterations(func), numbers, operands, carried, without_buffer, row_parts(func))
    for table in (reader.moved_by, reader.refetched_by, reader.placed_by):
        table |= {index: frozenset({n}) for n, index in enumerate(func.body.args)}
    grid = tuple(Loop(axis.extent, axis.block, n) for n, axis in enumerate(func.axes))
    reader.loops = len(grid)
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
    without_buffer: set[Value]  # values in the memory of a carry, or of a sum that a product is added to
    row_parts: set[Op]  # accesses that have whole rows together
    readings: Readings | None = None  # of the block that is read
    earlier: list[MemoryOp] = field(default_factory=list[MemoryOp])  # the ops of `accesses`
    folds: list[tuple[Loop, ...]] = field(default_factory=list[tuple[Loop, ...]])
    ops: list[TileOp] = field(default_factory=list[TileOp])
    products: list[Product] = field(default_factory=list[Product])
    accesses: list[TileAccess] = field(default_factory=list[TileAccess])
    loops: int = 0  # how many loops were numbered
    vectors: set[Value] = field(default_factory=set[Value])  # loaded vectors, and what is computed of these alone
    # Operations for an element of a value that is computed lane by lane from arrays and other tiles.
    cost: dict[Value, float] = field(default_factory=dict[Value, float])
    # By value the numbers of the loops around it that it depends on; a missing value depends on none.
    moved_by: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])
    # The same, by which the index of a fold depends on all that the fold reads.
    refetched_by: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])
    # The same, by which the index of a fold depends on the fold alone, wherever its tiles begin and end.
    placed_by: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])

    def block(self, block: Block, loops: tuple[Loop, ...]) -> Held:
        """Read the ops of a block inside of loops."""
        around, self.readings = self.readings, self._readings(block)
        inner = [held for op in block.ops for held in self._op(op, loops)]
        self.readings = around
        return self._held(block, inner)

    def _readings(self, block: Block) -> Readings:
        costs = dict(self.cost)
        for op in block.ops:
            costs |= dict.fromkeys(op.results, self._cost(op, costs))

        def is_stored(value: Value) -> bool:
            return costs.get(value, 0) > _CHEAP and value not in self.without_buffer

        return Readings(block, is_stored, _AFTER)

    def _op(self, op: Op, loops: tuple[Loop, ...]) -> list[Held]:
        self._note_loops(op, len(loops))
        match op:
            case Fold():
                inside = (*loops, self._loop(op.axis.extent, op.axis.block, self._part(op)))
                self.folds.append(inside)
                return [self.block(op.body, inside)]
            case While() | Switch():
                if isinstance(op, While | Hoist):
                    return [self.block(region, loops) for region in op.regions]
                part = 1 / len(op.regions)
                return [self.block(region, (*loops, self._loop(1, 1, part))) for region in op.regions]
            case Dot():
                self.products.append(_product(op, loops))
            case MemoryOp():
                self.accesses.append(self._access(op, loops))
                self.vectors.update(result for result in op.results if len(result.tile.shape) == 1)
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
        of_vectors = any(value in self.vectors for value in op.operands)
        if isinstance(op, Elementwise | Convert) and of_vectors and len(op.results[0].tile.shape) == 1:
            self.vectors.add(op.results[0])
        turns = isinstance(op, Broadcast) and of_vectors and op.dims[-1] != len(op.shape) - 1
        return TileOp(self._tile(op.operands[0] if dims else op.results[0]), loops, function, dims, moves, turns)

    def _held(self, block: Block, inner: Sequence[Held]) -> Held:
        """What a program holds while it runs a block.

        A step is all that can be computed in one pass over the lanes.
        """
        step, last, last_of_buffer = dict[Value, int](), dict[Value, int](), dict[Value, int]()
        for op in block.ops:
            used = [v for v in op.uses() if v in step]
            here = max((step[v] for v in used), default=0)
            whole, by_lanes = isinstance(op, _WHOLE), isinstance(op, Scan | LinearScan)
            for value in used:
                last[value] = max(last.get(value, 0), here + whole)
                last_of_buffer[value] = max(last_of_buffer.get(value, 0), here + (whole and not by_lanes))
            step |= dict.fromkeys(op.results, here + isinstance(op, _AFTER))
            self.cost |= dict.fromkeys(op.results, self._cost(op, self.cost))
        end = max(step.values(), default=0) + 1
        of_results = {value: end for value in block.results if value in step}
        last, last_of_buffer = last | of_results, last_of_buffer | of_results
        # A result that exists only as a whole is in memory also at its own step. What a loop starts with and yields is
        # in the memory of the carry, and a product that is added to a tile is added there.
        stored = {
            v: first - (self.cost[v] == math.inf)
            for v, first in step.items()
            if self.cost[v] > _CHEAP and v not in self.without_buffer
        }
        tiles = [value for value in block.args if isinstance(value.type, TileType) and value.tile.shape]
        carries = tuple(map(self._tile, tiles))
        return Held(self._at_steps(step, last, end), self._at_steps(stored, last_of_buffer, end), carries, tuple(inner))

    def _at_steps(
        self, first: Mapping[Value, int], last: Mapping[Value, int], end: int
    ) -> tuple[tuple[Tile, ...], ...]:
        """For each step the tiles of the values that a step before it computes and that are still used."""
        return tuple(
            tuple(self._tile(value) for value, at_first in first.items() if at_first < at <= last.get(value, 0))
            for at in range(1, end + 1)
        )

    def _cost(self, op: Op, costs: Mapping[Value, float]) -> float:
        """Operations for an element of the result, lane by lane; infinite if the result exists only as a whole."""
        if isinstance(op, _AFTER):
            return math.inf
        own = 0 if isinstance(op, _FREE) else 1
        if isinstance(op, Elementwise) and op.function in TRANSCENDENTAL | {"div", "rem"}:
            own = _CHEAP + 1
        cost = own + sum(cost for v in op.operands if (cost := costs.get(v, 0)) < math.inf)
        # A broadcast stores what would be computed again for each of its rows.
        repeats = isinstance(op, Broadcast) and math.prod(op.shape) > op.operands[0].tile.size
        return 0 if repeats and cost > _CHEAP else cost

    def _tile(self, value: Value) -> Tile:
        return Tile(value.tile.shape, value.tile.dtype.itemsize, value in self.operands, value in self.carried)

    def _note_loops(self, op: Op, depth: int) -> None:
        """Note the loops that the values of an op depend on, inside of `depth` loops."""
        for table in (self.moved_by, self.refetched_by, self.placed_by):
            by = _loops_of(op.uses(), table)
            # An iteration of a loop depends on all iterations before it.
            inside_by = by | {depth} if isinstance(op, Fold) else by
            table |= dict.fromkeys((a for region in op.regions for a in region.args), inside_by)
            table |= dict.fromkeys(op.results, by)
        if isinstance(op, Fold):
            self.moved_by[op.body.args[0]] = _loops_of((op.start, op.stop), self.moved_by) | {depth}
            self.placed_by[op.body.args[0]] = frozenset({depth})

    def _loop(self, extent: int, block: int, part: float) -> Loop:
        self.loops += 1
        return Loop(extent, block, self.loops - 1, part)

    def _access(self, op: MemoryOp, loops: tuple[Loop, ...]) -> TileAccess:
        dims = op.access.dims
        last = [op.positions[term.operand] for dim in dims[-1:] for term in dim.position.terms]
        moved, streamed = (_loops_of(values, self.moved_by) for values in (op.positions, last))
        refetched, placed = (_loops_of(op.positions, table) for table in (self.refetched_by, self.placed_by))
        shifted = self._shift(op)
        assert self.readings is not None
        self.earlier.append(op)
        return TileAccess(
            sizes=tuple(dim.size for dim in dims),
            loops=loops,
            rows_of_use=self.readings.rows_of_use(op) if isinstance(op, Load) else 1,
            passes=self.readings.passes(op) if isinstance(op, Load) else 1,
            moved_by=tuple(n in moved for n in range(len(loops))),
            streamed_by=tuple(n in streamed for n in range(len(loops))),
            refetched_by=tuple(n in refetched for n in range(len(loops))),
            placed_by=tuple(n in placed for n in range(len(loops))),
            array=self.arrays[op.ref],
            extents=tuple(op.extents),
            kinds=tuple(dim.kind for dim in dims),
            aligned=tuple(dim.kind != "block" or dim.position.is_multiple_of(dim.size) for dim in dims),
            itemsize=op.ref.ref.dtype.itemsize,
            is_operand=any(result in self.operands for result in op.results),
            stores=not isinstance(op, Load),
            shares_rows=op in self.row_parts,
            shift=shifted,
        )

    def _shift(self, op: MemoryOp) -> Shift | None:
        """The distance of an access to an earlier one of the array."""

        def loops(position: Position) -> list[int]:
            return sorted(_loops_of([op.positions[term.operand] for term in position.terms], self.moved_by))

        return shift(op, self.earlier, loops)

    def _part(self, op: Fold) -> float:
        """The mean part of the tiles that a fold visits."""
        axis = op.axis
        return float(self.of_folds.of(op) * axis.block / axis.extent) if axis.extent else 0.0


def _loops_of(values: Iterable[Value], table: Mapping[Value, frozenset[int]]) -> frozenset[int]:
    """The numbers of the loops that any of some values depends on."""
    return frozenset[int]().union(*(table.get(value, frozenset()) for value in values))


def _summands(func: Func) -> set[Value]:
    """The matrix products whose only use is an addition."""
    uses = Counter(
        value for op in func.walk() for values in (op.operands, *(r.results for r in op.regions)) for value in values
    )
    added = [v for op in func.walk() if isinstance(op, Elementwise) and op.function == "add" for v in op.operands]
    products = {op.result for op in func.walk() if isinstance(op, Dot)}
    return {value for value in added if value in products and uses[value] == 1}


def _product(op: Dot, loops: tuple[Loop, ...]) -> Product:
    lhs, rhs = op.tiles(2)
    batch, k = (math.prod(lhs.shape[d] for d in dims) for dims in (op.batch[0], op.contract[0]))
    m, n = (math.prod(op.operands[side].tile.shape[d] for d in op.free(side)) for side in (0, 1))
    return Product(batch, m, n, k, loops, (lhs.dtype.itemsize, rhs.dtype.itemsize))
