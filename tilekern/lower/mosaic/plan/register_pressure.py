"""Register pressure: the values of a block that do not stay in registers, and the bytes of VMEM that each one takes.

Mosaic unrolls each op over the registers of its tile, and schedules chains of elementwise ops register by register. So
most tiles never exist as a whole. A tile exists as a whole if an op needs all of it and a later op uses it:

    barriers   reductions, dots and transpositions: softmax keeps the logits until exp(s - m), since the maximum m
               needs all logits
    shifts     unaligned slices and concatenations, which read elements from other lanes or rows: each step of a scan
               adds a tile to its shifted copy
    dots       matrix units run dots one after the other: the result of a dot waits for the result that it meets
    functions  matrix units give results faster than vector units compute exp and log: in x - log(1 + exp(x)), the
               dot's result x waits for the logarithm

Other tiles exist as a whole wherever they are used:

    operands       the computed left operand of a dot, which the matrix unit needs whole; an operand of several dots
    captures       a tile from around a loop that the loop uses, unless the loop only multiplies it, in few passes;
                   a vector that the loop broadcasts along the lanes takes as much as a tile of 128 lanes
    reshapes       a tile of few lanes, which goes through memory; of another reshape of lanes, a part
    concatenation  of parts of one tile: the parts are computed together, and all but the first wait
    switches       the results and the captured tiles
    gathers        along lanes: the operand and the result, if they are large
    broadcasts     of rows along a dim between the rows and the lanes: each row fills a register
    loads          from an unaligned lane, if they are widened; with more than two dims, from any lane but the first
    packed rows    one row of a two-byte dtype that depends on a reduction: it is packed before it is stored
    columns        sums over lanes that feed a reduction: a column takes as much as a tile of 128 lanes

All figures are estimates, measured with libtpu 0.0.51.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

from tilekern.ir.analysis.costs import TRANSCENDENTAL
from tilekern.ir.compute import Convert, Dot, Reduce
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Reshape, Slice, Transpose
from tilekern.ir.types import F32, RefType
from tilekern.lower.mosaic.calibration import (
    AWAITED_FUNCTIONS,
    CONCATENATED_SHARE,
    LONG_ROW_SHARE,
    MANY_PASSES,
    NARROW_RESHAPED_SHARE,
    PADDED_RESHAPE,
    REGISTER_TILE_BYTES,
    RELOADED_BYTES,
    RESHAPED_SHARE,
)
from tilekern.lower.mosaic.chip import LANES, SUBLANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.dot_operands import dot_results, is_one_column_pass, split_operands
from tilekern.lower.mosaic.plan.hbm_layout import packing
from tilekern.lower.mosaic.plan.value_sizes import (
    BARRIERS,
    REPEATED,
    VIEWS,
    KernelContext,
    has_long_rows,
    is_computed,
    is_packed_row,
    is_row_broadcast,
    is_streamed,
    value_bytes,
)


@record
class _Ancestry:
    """The ancestors of a value: the values that it is computed from.

    Attributes:
      tiles: the ancestors that are large tiles.
      reduced: the tiles that reach the value through a barrier.
      shifted: the tiles that reach the value through a shift.
      dots: the numbers of the dots whose results the value streams; a reduction ends the streaming.
      functions: the longest chain of functions such as exp since the last dot or reduction.
      reductions: the longest chain of reductions; a reduction over lanes counts 1, any other 2.
      has_data: True if the value depends on a load, or on a value from around the block.
    """

    tiles: frozenset[Value] = frozenset()
    reduced: frozenset[Value] = frozenset()
    shifted: frozenset[Value] = frozenset()
    dots: frozenset[int] = frozenset()
    functions: int = 0
    reductions: int = 0
    has_data: bool = False

    def __or__(self, other: _Ancestry) -> _Ancestry:
        if self == _NONE or other == _NONE:
            return other if self == _NONE else self
        tiles, reduced, shifted = self.tiles | other.tiles, self.reduced | other.reduced, self.shifted | other.shifted
        reductions, has_data = max(self.reductions, other.reductions), self.has_data or other.has_data
        dots, functions = self.dots | other.dots, max(self.functions, other.functions)
        return _Ancestry(tiles, reduced, shifted, dots, functions, reductions, has_data)


_NONE, _DATA = _Ancestry(), _Ancestry(has_data=True)


def vmem_values(block: Block, kernel: KernelContext) -> dict[Value, int]:
    """The values of a block that take VMEM, and the bytes of each."""
    return _BlockAnalysis(block, kernel).run()


@dataclass
class _BlockAnalysis:
    block: Block
    kernel: KernelContext
    sizes: dict[Value, int] = field(default_factory=dict[Value, int])

    def __post_init__(self) -> None:
        self.producers = {r: op for op in self.block.ops for r in op.results}
        self.dot_results, self.split_operands = dot_results(self.block), split_operands(self.block, self.kernel.chip)
        self.converted_to_f32 = {op.operands[0] for op in self.block.ops if isinstance(op, Convert) and op.dtype == F32}
        self.ancestry: dict[Value, _Ancestry] = {}
        self.waiting: list[Value] = []  # values that wait for a dot or for functions
        self.rows: list[tuple[Value, Value]] = []  # reductions that depend on reductions, and their operands

    def run(self) -> dict[Value, int]:
        for n, op in enumerate(self.block.ops):
            ancestries = [self.ancestry.get(v, _DATA) for v in op.operands]
            before = reduce(lambda a, b: a | b, ancestries, _NONE)
            self._mark_reused(op, ancestries, before)
            self._mark_whole(op, before)
            for result in op.results:
                self.ancestry[result] = self._ancestry_of(op, n, before)
        order = {r: n for n, op in enumerate(self.block.ops) for r in op.results}
        for value in sorted(self.waiting, key=order.__getitem__):
            if not self._is_recomputed(value):
                self._mark(value, self._reuse_bytes(value))
        for column, tile in self.rows:
            # The reduction keeps a column of equal lanes, unless the reduced tile is in VMEM anyway.
            narrow = tile.tile.shape[1] <= 2 * LANES and tile not in self.dot_results
            if narrow and tile not in self.sizes:
                self._mark(column, column.tile.shape[0] * LANES * 4)
        for value, size in _loop_captures(self.block, self.kernel, self.producers):
            self._mark(value, size)
        for op in filter(self.kernel.is_loop, self.block.ops):
            columns = _captured_columns(op, self.producers)
            if sum(columns.values()) > REGISTER_TILE_BYTES:
                self.sizes.update(columns)
        return self.sizes

    def _mark(self, value: Value, size: int) -> None:
        if size > REGISTER_TILE_BYTES or (value in self.split_operands and size > REGISTER_TILE_BYTES // 2):
            self.sizes[value] = max(size, self.sizes.get(value, 0))

    def _reuse_bytes(self, value: Value) -> int:
        """The bytes that a value takes if it is used on both sides of a barrier; a load is in part repeated instead."""
        if isinstance(value.type, RefType) or len(value.tile.shape) < 2:
            return 0
        op = self.producers.get(value)
        if op is not None and not isinstance(op, Load):
            return value_bytes(value, op, self.kernel) if is_computed(value, self.producers) else 0
        if has_long_rows(value, self.producers):
            return int(padded_bytes(value.tile.shape, F32) * LONG_ROW_SHARE)
        if value.tile.dtype.itemsize < 4:
            return padded_bytes(value.tile.shape, F32 if value in self.converted_to_f32 else value.tile.dtype)
        return min(padded_bytes(value.tile.shape, value.tile.dtype), RELOADED_BYTES)

    def _mark_reused(self, op: Op, ancestries: Sequence[_Ancestry], before: _Ancestry) -> None:
        """Mark the operands that wait for another operand, which is computed from them by a barrier or shift.

        Example: in `sub x, broadcast(max(x))`, x waits for its maximum.

        Args:
          op: the op.
          ancestries: the ancestry of each operand.
          before: the union of the ancestries.
        """
        last = max(before.dots, default=-1)
        for v, ancestry in zip(op.operands, ancestries, strict=True):
            if v in before.reduced:
                if before.reductions < 2 and self._reuse_bytes(v) == RELOADED_BYTES:
                    continue
                # A tile of one register in width is reduced register by register, unless matrix units produce it.
                if v.tile.shape[-1] > LANES or v in self.dot_results or before.reductions > 1:
                    self._mark(v, self._reuse_bytes(v))
            elif v in before.shifted:
                self._mark(v, self._reuse_bytes(v))
                self._mark_shifted(op, v)
            elif ancestry.dots and not isinstance(self.producers[v], Broadcast):
                awaits_functions = before.functions - ancestry.functions >= AWAITED_FUNCTIONS
                if awaits_functions or max(ancestry.dots) < last:
                    self.waiting.append(v)

    def _is_recomputed(self, value: Value) -> bool:
        """True if vector units compute a tile again from tiles in VMEM, without functions such as exp."""
        op = self.producers.get(value)
        if op is None or _is_function(op) or not is_streamed(op):
            return False
        tiles = [v for v in op.operands if is_computed(v, self.producers)]
        tiles = [v for v in tiles if not isinstance(self.producers[v], Broadcast)]
        return bool(tiles) and all(v in self.sizes or self._is_recomputed(v) for v in tiles)

    def _mark_shifted(self, op: Op, value: Value) -> None:
        """Mark the operands of an op that are shifted along the lanes: they wait together with `value`."""
        if value not in self.producers or isinstance(self.producers[value], Load):
            return
        for operand in op.operands:
            producer = self.producers.get(operand)
            if producer is not None and _moved_dim(producer) == 1:
                self._mark(operand, value_bytes(operand, producer, self.kernel))

    def _mark_whole(self, op: Op, before: _Ancestry) -> None:
        """Mark the operands and results that exist as a whole; `before` is the union of the operands' ancestries."""
        if isinstance(op, Dot):
            lhs = op.operands[0]
            streams = is_one_column_pass(op, self.kernel.chip) and lhs not in self.dot_results and lhs.tile.dtype != F32
            if not streams and is_computed(
                lhs, self.producers, REGISTER_TILE_BYTES // 2 if lhs in self.split_operands else REGISTER_TILE_BYTES
            ):
                self._mark(lhs, value_bytes(lhs, self.producers[lhs], self.kernel))
        for value in _whole_values(op, before.reductions > 0, self.producers):
            self._mark(value, value_bytes(value, self.producers.get(value, op), self.kernel))
        if isinstance(op, Concatenate | Reshape):
            self._mark(op.result, self._moved_bytes(op))
        if isinstance(op, Reduce) and op.dims == (0,):
            self._mark_column(op.operands[0])
        if isinstance(op, Reduce) and before.reductions and len(op.operands[0].tile.shape) == 2 and op.dims == (1,):
            self.rows.append((op.result, op.operands[0]))

    def _mark_column(self, value: Value) -> None:
        """Mark sums over lanes that a reduction over rows follows directly: they wait as columns."""
        op = self.producers.get(value)
        while isinstance(op, Broadcast | Convert | Reshape):
            value = op.operands[0]
            op = self.producers.get(value)
        if isinstance(op, Reduce) and len(value.tile.shape) == 1 and op.dims == (1,):
            self._mark(value, value.tile.shape[0] * LANES * 4)

    def _moved_bytes(self, op: Concatenate | Reshape) -> int:
        """The bytes of a concatenation or reshape that wait in VMEM.

        Parts of a concatenation that are computed from one tile are computed together: all but the first wait.
        """
        tile, rank = op.result.tile, len(op.result.tile.shape)
        if isinstance(op, Concatenate) and rank > 2 and op.dim == rank - 2 and tile.shape[-2] % SUBLANES:
            return value_bytes(op.result, op, self.kernel) if any(map(self._is_computed_view, op.operands)) else 0
        if rank != 2:
            return 0
        size = padded_bytes(tile.shape, F32)
        if isinstance(op, Reshape):
            shape = op.operands[0].tile.shape
            moves = len(shape) == 2 and shape[1] != tile.shape[1] and min(shape[1], tile.shape[1]) > 1
            return int(size * (NARROW_RESHAPED_SHARE if tile.dtype.itemsize < 4 else RESHAPED_SHARE)) if moves else 0
        if op.dim == 1:
            has_data = any(self.ancestry[v].has_data for v in op.operands if self._is_computed_view(v))
            return size if _moved_dim(op) == 1 and has_data and tile.shape[1] % LANES == 0 else 0
        parts = [self.ancestry[v].tiles for v in set(op.operands) if self._is_computed_view(v)]
        common = any(a & b for n, a in enumerate(parts) for b in parts[:n])
        return int(size * CONCATENATED_SHARE) if common else 0

    def _is_computed_view(self, value: Value) -> bool:
        op = self.producers.get(value)
        while isinstance(op, (*VIEWS, Slice)):
            op = self.producers.get(op.operands[0])
        return op is not None and not isinstance(op, REPEATED)

    def _ancestry_of(self, op: Op, n: int, before: _Ancestry) -> _Ancestry:
        """The ancestry of the results of op number `n`; `before` is the union of the operands' ancestries."""
        tiles = before.tiles.union(v for v in op.operands if self._reuse_bytes(v))
        if isinstance(op, BARRIERS):
            over = op.dims if isinstance(op, Reduce) else (op.dim,) if isinstance(op, ArgReduce) else ()
            reductions = before.reductions + (1 if over == (len(op.operands[0].tile.shape) - 1,) else 2)
            if isinstance(op, Dot):
                return replace(before, tiles=tiles, reduced=before.reduced | tiles, dots=frozenset({n}), functions=0)
            after = replace(before, tiles=tiles, reduced=before.reduced | tiles, reductions=reductions)
            return replace(after, dots=frozenset(), functions=0)
        if self._gives_dot(op):
            return replace(before, dots=frozenset({n}), functions=0)
        if isinstance(op, Transpose):
            return replace(before, tiles=tiles, reduced=before.reduced | tiles)
        shifted = before.shifted | tiles if _moved_dim(op) is not None else before.shifted
        return replace(before, tiles=tiles, shifted=shifted, functions=before.functions + _is_function(op))

    def _gives_dot(self, op: Op) -> bool:
        """True if all iterations of a loop are unrolled, and matrix units compute them."""
        return self.kernel.is_unrolled(op) and any(isinstance(inner, Dot) for inner in op.walk())


def _is_function(op: Op) -> bool:
    return isinstance(op, Elementwise) and op.function in TRANSCENDENTAL


def _moved_dim(op: Op) -> int | None:
    """The dim along which an op moves elements within registers: 0 for rows, 1 for lanes, None if it moves none."""
    rank = len(op.results[0].tile.shape) if op.results and not op.regions else 0
    if rank < 2 or not isinstance(op, Slice | Concatenate):
        return None
    for dim, unit in ((1, LANES), (0, packing(op.result.tile.dtype))):
        d = rank - 2 + dim
        if isinstance(op, Slice) and op.start[d] % unit:
            return dim
        if isinstance(op, Concatenate) and op.dim == d and any(v.tile.shape[d] % unit for v in op.operands[:-1]):
            return dim
    return None


def _loop_captures(block: Block, kernel: KernelContext, producers: Mapping[Value, Op]) -> Iterator[tuple[Value, int]]:
    """Pairs (value, bytes) of the values from around a loop that stay in VMEM, and are not loaded in each iteration."""
    for op in block.ops:
        for value in captured_values(op) if kernel.is_loop(op) else ():
            producer = producers.get(value)
            if producer is None or _only_multiplied(value, op, kernel.chip):
                continue
            if isinstance(producer, Load) and len(value.tile.shape) > 1:
                yield value, padded_bytes(value.tile.shape, value.tile.dtype)
            elif is_computed(value, producers):
                yield value, value_bytes(value, producer, kernel)


def _captured_columns(loop: Op, producers: Mapping[Value, Op]) -> dict[Value, int]:
    """The bytes of each vector from around a loop that the loop broadcasts along the lanes.

    Such a vector waits as a column of registers with equal lanes. The columns of a loop share the registers. Integers
    are positions, which the compiler computes again.
    """
    inside = [op for region in loop.regions for op in region.walk() if isinstance(op, Broadcast)]
    broadcast = {op.operands[0] for op in inside if op.dims == (0,) and len(op.shape) == 2}
    computed = [v for v in broadcast if v in producers and not isinstance(producers[v], REPEATED)]
    return {v: v.tile.shape[0] * LANES * 4 for v in computed if v.tile.dtype == F32}


def _only_multiplied(value: Value, loop: Op, chip: Chip) -> bool:
    """True if a loop uses a value only in dots, whose depths take few passes through the matrix units."""
    users = [op for region in loop.regions for op in region.walk() if value in op.operands]
    depths = [prod(value.tile.shape[d] for d in op.contract[0]) for op in users if isinstance(op, Dot)]
    return len(depths) == len(users) and max(depths, default=0) < MANY_PASSES * chip.matrix_size


def captured_values(op: Op) -> set[Value]:
    """The values that the regions of an op use, arrays aside."""
    inside = {v for region in op.regions for inner in region.walk() for v in inner.operands}
    return {v for v in inside if not isinstance(v.type, RefType)}


def _whole_values(op: Op, after_reduction: bool, producers: Mapping[Value, Op]) -> Sequence[Value]:
    """The values that an op needs or makes as a whole; `after_reduction` is True if the op depends on a reduction."""
    match op:
        case Reshape() | Transpose() if len(op.result.tile.shape) > 2 or isinstance(op, Reshape):
            tile = op.result.tile
            return op.results if padded_bytes(tile.shape, tile.dtype) > PADDED_RESHAPE * tile.nbytes else ()
        case Convert():
            return op.results if after_reduction and is_packed_row(op) else ()
        case Load(access=access) if access.dims and op.result.tile.dtype.itemsize < 4:
            start = access.dims[-1].position.const
            return op.results if start % LANES or (start and len(op.result.tile.shape) > 2) else ()
        case Broadcast() if is_row_broadcast(op):
            return () if isinstance(producers.get(op.operands[0]), Reduce) else op.results
        case Take():
            return (op.operands[0], op.result)
        case _:
            return ()
