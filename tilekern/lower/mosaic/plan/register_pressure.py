"""Values of one stretch of code that do not stay in registers, and the bytes of VMEM that each one takes.

Mosaic writes all registers of a tile out, and its scheduler goes through elementwise chains register by register. A
tile exists as a whole where one op needs all of another one's result, and the tile is used again afterwards:

    barriers   a reduction, a dot, a transposition: logits are there until exp(s - m), for the maximum m is of all
    shifts     elements from other lanes or rows, by slices and concatenations that are not aligned: each step of a scan
               adds a tile to itself, shifted
    dots       what one gives is there until the next one's result meets it, for matrix units do one after the other

Others are tiles by themselves, whatever is done with them:

    the left operand of a dot that is computed, for the matrix unit wants it as a whole; what several dots multiply
    what a loop uses from around it, unless all that it does is to multiply it in few passes
    a tile of few lanes that a reshape makes, for it goes through memory; other reshapes of lanes, in part
    what is put together from parts of one tile: the parts are computed together, and the last ones wait
    what a switch gives, and what it takes; of what gathers along the lanes, both, if they are large
    rows that are repeated along a dim between theirs and the lanes: each one fills a register
    what is loaded from between the lanes, if it has to be widened; of more than two dims, from anywhere but the front
    a single row of two-byte numbers that follows from a reduction of it, for it is packed before it is stored
    sums over lanes with a reduction behind them: a column of them is as large as a tile of 128 lanes

All figures are estimates, measured with libtpu 0.0.51.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import F32, RefType
from tilekern.lower.mosaic.chip import LANES, SUBLANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import Layout, packing
from tilekern.lower.mosaic.plan.unroll import Rounds

PARTS = {"ieee": 3, "bf16x6": 3, "bf16x3": 2}
"""Narrow numbers that one of float32 is cut into, by the precision of a dot."""

SMALL = 208 << 10
"""Bytes of a tile that fits the registers."""

_STRETCH = {"tpu:7x": 512}  # columns that are multiplied at once, where those are not one matrix unit's
_IN_REGISTERS = 16 * LANES  # columns of eight rows that fit them
_LOADED_ONCE = 288 << 10  # of a tile of float32 that is loaded again behind a barrier (measured: 0 to 460)
_FREE = (Constant, Iota, Load)  # read or made again where they are used
_BARRIERS = (Reduce, ArgReduce, Dot)
_VIEWS = (Transpose, Reshape, Broadcast)


@dataclass(frozen=True)
class Kernel:
    """The state of all blocks of a kernel; `triangles` are the masks below a diagonal that the compiler knows."""

    chip: Chip
    rounds: Mapping[Fold, Rounds]
    layouts: Mapping[MemoryOp, Layout | None]
    triangles: frozenset[Value]

    def rounds_of(self, op: Op) -> Rounds:
        """The way in which a loop is written out."""
        return self.rounds.get(op, Rounds()) if isinstance(op, Fold) else Rounds()

    def in_line(self, op: Op) -> bool:
        """True if an op is a loop without a loop: all iterations are written out."""
        return isinstance(op, Fold) and not self.rounds_of(op).repeated

    def repeats(self, op: Op) -> bool:
        """True if an op is a loop inside of the kernel that stays one."""
        return isinstance(op, While) or (isinstance(op, Fold) and op in self.rounds and not self.in_line(op))


@dataclass(frozen=True)
class _Past:
    """The values that a value is computed from.

    Attributes:
      above: large tiles.
      reduced: those of them that all of a reduction or a dot in between is of.
      shifted: those of which it has elements from other lanes or rows.
      dots: the numbers of the dots that gave its tiles, vectors aside.
      data: whether it depends on anything that is loaded or comes from around the block.
      depth: how many reductions over lanes come one after the other; over rows, one counts as two.
    """

    above: frozenset[Value] = frozenset()
    reduced: frozenset[Value] = frozenset()
    shifted: frozenset[Value] = frozenset()
    dots: frozenset[int] = frozenset()
    depth: int = 0
    data: bool = False

    def __or__(self, other: _Past) -> _Past:
        if self == _NOTHING or other == _NOTHING:
            return other if self == _NOTHING else self
        above, reduced, shifted = self.above | other.above, self.reduced | other.reduced, self.shifted | other.shifted
        depth, data = max(self.depth, other.depth), self.data or other.data
        return _Past(above, reduced, shifted, self.dots | other.dots, depth, data)


_NOTHING, _DATA = _Past(), _Past(data=True)


def kept(block: Block, kernel: Kernel) -> dict[Value, int]:
    """The values of a block that are in VMEM, and the bytes that each one takes."""
    return _Search(block, kernel).run()


@dataclass
class _Search:
    block: Block
    kernel: Kernel
    found: dict[Value, int] = field(default_factory=dict[Value, int])

    def __post_init__(self) -> None:
        self.made = {r: op for op in self.block.ops for r in op.results}
        self.multiplied, self.split = multiplied(self.block), split(self.block, self.kernel.chip)
        self.widened = {op.operands[0] for op in self.block.ops if isinstance(op, Convert) and op.dtype == F32}
        self.past: dict[Value, _Past] = {}
        self.rows: list[tuple[Value, Value]] = []  # reductions behind reductions, and what they are of

    def run(self) -> dict[Value, int]:
        for n, op in enumerate(self.block.ops):
            pasts = [self.past.get(v, _DATA) for v in op.operands]
            before = reduce(lambda a, b: a | b, pasts, _NOTHING)
            self._used_again(op, pasts, before)
            self._by_itself(op, before)
            for result in op.results:
                self.past[result] = self._after(op, n, before)
        for column, tile in self.rows:
            # Of these there is a column of equal lanes, unless the tile they are of is there until they are.
            narrow = tile.tile.shape[1] <= 2 * LANES and tile not in self.multiplied
            if narrow and tile not in self.found:
                self._keep(column, column.tile.shape[0] * LANES * 4)
        for value, size in _captured(self.block, self.kernel, self.made):
            self._keep(value, size)
        return self.found

    def _keep(self, value: Value, size: int) -> None:
        if size > SMALL or (value in self.split and size > SMALL // 2):
            self.found[value] = max(size, self.found.get(value, 0))

    def _weight(self, value: Value) -> int:
        """The bytes of a value that is used on both sides of a barrier: what is loaded is loaded again in part."""
        if isinstance(value.type, RefType) or len(value.tile.shape) < 2:
            return 0
        op = self.made.get(value)
        if op is not None and not isinstance(op, Load):
            return size_of(value, op, self.kernel) if is_computed(value, self.made) else 0
        if is_wide(value, self.made):
            return padded_bytes(value.tile.shape, F32) * 3 // 4
        if value.tile.dtype.itemsize < 4:
            return padded_bytes(value.tile.shape, F32 if value in self.widened else value.tile.dtype)
        return min(padded_bytes(value.tile.shape, value.tile.dtype), _LOADED_ONCE)

    def _used_again(self, op: Op, pasts: Sequence[_Past], before: _Past) -> None:
        """The operands of an op from before a barrier, where others come from behind it."""
        last = max(before.dots, default=-1)
        for v, past in zip(op.operands, pasts, strict=True):
            if v in before.reduced:
                if before.depth < 2 and self._weight(v) == _LOADED_ONCE:
                    continue
                # Rows of a register are done one after the other, but not those that matrix units give.
                if v.tile.shape[-1] > LANES or v in self.multiplied or before.depth > 1:
                    self._keep(v, self._weight(v))
            elif v in before.shifted:
                self._keep(v, self._weight(v))
                self._keep_shifted(op, v)
            elif past.dots and max(past.dots) < last and not isinstance(self.made[v], Broadcast):
                self._keep(v, self._weight(v))

    def _keep_shifted(self, op: Op, value: Value) -> None:
        """Lanes that are shifted wait, too."""
        for other in op.operands:
            by = self.made.get(other)
            if value in self.made and not isinstance(self.made[value], Load) and by is not None and _shift(by) == 1:
                self._keep(other, size_of(other, by, self.kernel))

    def _by_itself(self, op: Op, before: _Past) -> None:
        """The values that an op needs or makes as a whole whatever is done with them."""
        if isinstance(op, Dot):
            lhs = op.operands[0]
            streams = is_once(op, self.kernel.chip) and lhs not in self.multiplied and lhs.tile.dtype != F32
            if not streams and is_computed(lhs, self.made, SMALL // 2 if lhs in self.split else SMALL):
                self._keep(lhs, size_of(lhs, self.made[lhs], self.kernel))
        for value in _needed(op, before.depth > 0, self.made):
            self._keep(value, size_of(value, self.made.get(value, op), self.kernel))
        if isinstance(op, Concatenate | Reshape):
            self._keep(op.result, self._moved(op))
        if isinstance(op, Reduce) and op.dims == (0,):
            self._keep_column(op.operands[0])
        if isinstance(op, Reduce) and before.depth and len(op.operands[0].tile.shape) == 2 and op.dims == (1,):
            self.rows.append((op.result, op.operands[0]))

    def _keep_column(self, value: Value) -> None:
        """Sums over lanes wait, if a reduction over rows follows at once."""
        op = self.made.get(value)
        while isinstance(op, Broadcast | Convert | Reshape):
            value = op.operands[0]
            op = self.made.get(value)
        if isinstance(op, Reduce) and len(value.tile.shape) == 1 and op.dims == (1,):
            self._keep(value, value.tile.shape[0] * LANES * 4)

    def _moved(self, op: Concatenate | Reshape) -> int:
        """Of parts that are computed from the same tile, all but the first ones wait; so do reshaped lanes."""
        tile, rank = op.result.tile, len(op.result.tile.shape)
        if isinstance(op, Concatenate) and rank > 2 and op.dim == rank - 2 and tile.shape[-2] % SUBLANES:
            return size_of(op.result, op, self.kernel) if any(map(self._is_made, op.operands)) else 0
        if rank != 2:
            return 0
        size = padded_bytes(tile.shape, F32)
        if isinstance(op, Reshape):
            shape = op.operands[0].tile.shape
            moves = len(shape) == 2 and shape[1] != tile.shape[1] and min(shape[1], tile.shape[1]) > 1
            return size * (3 if tile.dtype.itemsize < 4 else 2) // 4 if moves else 0
        if op.dim == 1:
            made = any(self.past[v].data for v in op.operands if self._is_made(v))
            return size if _shift(op) == 1 and made and tile.shape[1] % LANES == 0 else 0
        parts = [self.past[v].above for v in set(op.operands) if self._is_made(v)]
        common = any(a & b for n, a in enumerate(parts) for b in parts[:n])
        return size * 2 // 3 if common else 0

    def _is_made(self, value: Value) -> bool:
        op = self.made.get(value)
        while isinstance(op, (*_VIEWS, Slice)):
            op = self.made.get(op.operands[0])
        return op is not None and not isinstance(op, _FREE)

    def _after(self, op: Op, n: int, before: _Past) -> _Past:
        above = before.above.union(v for v in op.operands if self._weight(v))
        if isinstance(op, _BARRIERS):
            over = op.dims if isinstance(op, Reduce) else (op.dim,) if isinstance(op, ArgReduce) else ()
            depth = before.depth + (1 if over == (len(op.operands[0].tile.shape) - 1,) else 2)
            if isinstance(op, Dot):
                return replace(before, above=above, reduced=before.reduced | above, dots=frozenset({n}))
            return replace(before, above=above, reduced=before.reduced | above, dots=frozenset(), depth=depth)
        if isinstance(op, Transpose):
            return replace(before, above=above, reduced=before.reduced | above)
        shifted = before.shifted | above if _shift(op) is not None else before.shifted
        return replace(before, above=above, shifted=shifted)


def _shift(op: Op) -> int | None:
    """Along which of the last two dims an op moves elements within registers: 0, rows; 1, lanes; None: it does not."""
    rank = len(op.results[0].tile.shape) if op.results and not op.regions else 0
    if rank < 2 or not isinstance(op, Slice | Concatenate):
        return None
    for which, unit in ((1, LANES), (0, packing(op.result.tile.dtype))):
        d = rank - 2 + which
        if isinstance(op, Slice) and op.start[d] % unit:
            return which
        if isinstance(op, Concatenate) and op.dim == d and any(v.tile.shape[d] % unit for v in op.operands[:-1]):
            return which
    return None


def _captured(block: Block, kernel: Kernel, made: Mapping[Value, Op]) -> Iterator[tuple[Value, int]]:
    """The values that loops use from around them: they are not loaded again in each iteration."""
    for op in block.ops:
        for value in captured(op) if kernel.repeats(op) else ():
            by = made.get(value)
            if by is None or _streams(value, op, kernel.chip):
                continue
            if isinstance(by, Load) and len(value.tile.shape) > 1:
                yield value, padded_bytes(value.tile.shape, value.tile.dtype)
            elif is_computed(value, made):
                yield value, size_of(value, by, kernel)


def _streams(value: Value, loop: Op, chip: Chip) -> bool:
    """True if all that a loop does with a value is to multiply it, in few passes through the matrix units."""
    users = [op for region in loop.regions for op in region.walk() if value in op.operands]
    depths = [prod(value.tile.shape[d] for d in op.contract[0]) for op in users if isinstance(op, Dot)]
    return len(depths) == len(users) and max(depths, default=0) < 4 * chip.matrix_size


def captured(op: Op) -> set[Value]:
    """The values from around an op that its regions use."""
    inside = {v for region in op.regions for inner in region.walk() for v in inner.operands}
    return {v for v in inside if not isinstance(v.type, RefType)}


@dataclass(frozen=True)
class Shared:
    """An operand of several dots is read once: from the first of them to the last, it is there, cut into its parts."""

    first: int
    last: int
    size: int


def shared(block: Block) -> dict[Value, Shared]:
    """Tiles, before they are turned, that are operands of several dots of a block."""
    made = {r: op for op in block.ops for r in op.results}
    dots: dict[Value, dict[int, Dot]] = {}
    for n, op in enumerate(block.ops):
        if isinstance(op, Dot):
            for value in op.operands:
                dots.setdefault(root_of(value, made), {})[n] = op
    found: dict[Value, Shared] = {}
    for value, by in dots.items():
        size = padded_bytes(value.tile.shape, value.tile.dtype)
        if value.tile.dtype == F32:
            size *= max(1 + PARTS[op.precision] if op.precision in PARTS else 1 for op in by.values())
        if len(by) > 1 and size > SMALL:
            found[value] = Shared(min(by), max(by), size)
    return found


def root_of(value: Value, made: Mapping[Value, Op]) -> Value:
    """The tile that a value is a view of."""
    op = made.get(value)
    while isinstance(op, Transpose | Reshape):
        value = op.operands[0]
        op = made.get(value)
    return value


def is_once(op: Dot, chip: Chip) -> bool:
    """True if the left operand is multiplied with one stretch of columns."""
    return prod(op.operands[1].tile.shape[d] for d in op.free(1)) <= _STRETCH.get(chip.name, chip.matrix_size)


def split(block: Block, chip: Chip) -> set[Value]:
    """Weights of float32 that are cut into parts while logits are still on their way: they take twice their size."""
    dots = [op for op in block.ops if isinstance(op, Dot) and op.operands[0].tile.dtype == F32 and is_once(op, chip)]
    return {op.operands[0] for op in dots if op.precision in PARTS} & multiplied(block)


def multiplied(block: Block) -> set[Value]:
    """The results of dots of a block, and all that follows from them."""
    found = set[Value]()
    for op in block.ops:
        if isinstance(op, Dot) or not found.isdisjoint(op.operands):
            found.update(op.results)
    return found


def _needed(op: Op, follows: bool, made: Mapping[Value, Op]) -> Sequence[Value]:
    """The values that an op needs or makes as a whole; `follows` says whether from a reduction."""
    match op:
        case Reshape() | Transpose() if len(op.result.tile.shape) > 2 or isinstance(op, Reshape):
            tile = op.result.tile
            return op.results if padded_bytes(tile.shape, tile.dtype) > 4 * tile.nbytes else ()
        case Convert():
            return op.results if follows and is_packed_row(op) else ()
        case Load(access=access) if access.dims and op.result.tile.dtype.itemsize < 4:
            start = access.dims[-1].position.const
            return op.results if start % LANES or (start and len(op.result.tile.shape) > 2) else ()
        case Broadcast() if _repeats_rows(op):
            return () if isinstance(made.get(op.operands[0]), Reduce) else op.results
        case Take():
            return (op.operands[0], op.result)
        case _:
            return ()


def _repeats_rows(op: Op) -> bool:
    """True if an op puts a dim between those of a tile's rows and lanes."""
    return isinstance(op, Broadcast) and len(op.dims) > 1 and op.dims[-2:] == (len(op.shape) - 3, len(op.shape) - 1)


def is_packed_row(op: Op) -> bool:
    """True if an op gives a single row of numbers of two bytes."""
    return isinstance(op, Convert) and op.result.tile.shape[:-1] == (1,) and op.result.tile.dtype.itemsize == 2


def is_computed(value: Value, made: Mapping[Value, Op], small: int = SMALL) -> bool:
    """True if a value is a large tile that is computed here."""
    op = made.get(value)
    if op is None or len(value.tile.shape) < 2 or padded_bytes(value.tile.shape, value.tile.dtype) <= small:
        return False
    while isinstance(op, _VIEWS):
        op = made.get(op.operands[0])
    return op is not None and not isinstance(op, _FREE)


def is_wide(value: Value, made: Mapping[Value, Op]) -> bool:
    """True if a value is a large tile that is loaded here, its rows too long for registers: most stays."""
    if not isinstance(made.get(value), Load):
        return False
    shape = value.tile.shape
    return len(shape) > 1 and shape[-1] > _IN_REGISTERS and padded_bytes(shape, value.tile.dtype) > SMALL


def size_of(value: Value, made: Op, kernel: Kernel) -> int:
    """The bytes of a value: of a tile of more than two dims whole registers, of what is moved between lanes 32 bits.

    A packed row fills a quarter of its registers, half on chips with vectors of bfloat16. Of what is loaded, long rows
    are loaded again in part (measured: 5 % to all of it). Of a triangle, 58 to 84 % is there (measured).
    """
    shape, dtype = value.tile.shape, F32 if isinstance(made, Load) else value.tile.dtype
    if _repeats_rows(made):
        shape = (*shape[:-2], SUBLANES, shape[-1])
    if len(shape) > 2 and not isinstance(made, Reshape):
        shape = (*shape[:-2], -(-shape[-2] // SUBLANES) * SUBLANES, shape[-1])
    size = padded_bytes(shape, dtype)
    if is_packed_row(made):
        return size * (2 if kernel.chip.bf16_vectors else 4)
    if isinstance(made, Select) and made.operands[0] in kernel.triangles:
        return size * 2 // 3
    return size * 3 // 4 if is_wide(value, {value: made}) else size
