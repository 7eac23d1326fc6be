"""Which values of a kernel go through VMEM, beside the blocks and carries that are there anyway.

Mosaic computes elementwise chains register by register, so most tiles never exist as a whole. These do:

    the operand of a dot that is computed, for the matrix unit wants it as a whole
    the left operand of a dot, though loaded, if it is multiplied with several stretches of columns
    a tile that is used again by what depends on a reduction of it: logits, first for their maximum, then for exp(s - m)
    a tile of few lanes that a reshape or a transposition makes, for these go through memory
    what a switch gives, and what it takes; of what gathers along the lanes, both, if they are large
    rows that are repeated along a dim between theirs and the lanes: each one fills a register
    what is loaded from between the lanes, if it has to be widened; of more than two dims, from anywhere but the front
    a single row of two-byte numbers that follows from a reduction of it, for it is packed before it is stored

This is an estimate; tests/lower/mosaic/test_library.py holds it against what libtpu reports for kernels of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import BOOL, F32
from tilekern.lower.mosaic.chip import LANES, SUBLANES, Chip, padded_bytes
from tilekern.lower.mosaic.layout import Layout
from tilekern.lower.mosaic.unroll import Rounds

_PARTS = {"ieee": 3, "bf16x6": 3, "bf16x3": 2}
_STRETCH = {"tpu:7x": 512}  # columns that are multiplied at once, where those are not one matrix unit's
_SMALL = 208 << 10  # fits the registers
_IN_REGISTERS = 16 * LANES  # columns of eight rows that fit them
_HELD = 124 << 10  # what stays in registers, where no dots need them (measured: 92 to 170)
_MOST_OPS = 2000
_FREE = (Constant, Iota, Load)  # read or made again where they are used
_BARRIERS = (Reduce, ArgReduce, Dot)
_VIEWS = (Transpose, Reshape, Broadcast)


@dataclass(frozen=True)
class _Kernel:
    """What all blocks of a kernel share; `triangles` are the masks below a diagonal that the compiler knows."""

    chip: Chip
    rounds: Mapping[Fold, Rounds]
    layouts: Mapping[MemoryOp, Layout | None]
    triangles: frozenset[Value]

    def rounds_of(self, op: Op) -> Rounds:
        return self.rounds.get(op, Rounds()) if isinstance(op, Fold) else Rounds()

    def in_line(self, op: Op) -> bool:
        """Whether an op is a loop without a loop: all iterations are written out."""
        return isinstance(op, Fold) and not self.rounds_of(op).repeated


def spilled_bytes(
    body: Block, chip: Chip, rounds: Mapping[Fold, Rounds], layouts: Mapping[MemoryOp, Layout | None]
) -> int:
    """The most bytes of VMEM that values of a kernel take at once.

    Args:
      body: its ops.
      chip: the TPU.
      rounds: how loops are written out.
      layouts: how loads see their arrays.
    """
    most = _spilled(body, _Kernel(chip, rounds, layouts, _triangles(body)), repeated=False)
    return most if any(isinstance(op, Dot) for op in body.walk()) else max(0, most - _HELD)


def _spilled(block: Block, kernel: _Kernel, repeated: bool) -> int:
    """The most that values of a block take, and of its loops: those have theirs beside it, though not at the same time.

    Only within one stretch of code do values take each other's place, and in that of a loop (`repeated`) only the parts
    of an operand do.
    """
    ops = block.ops
    made = {r: op for op in ops for r in op.results}
    last = _last_uses(block, kernel) if len(ops) <= _MOST_OPS else dict[Value, int]()
    split = _split(block, kernel.chip)
    in_line = sum(kernel.rounds_of(op).at_once for op in ops if kernel.in_line(op))
    most = loops = 0
    live = dict[Value, int]()
    for n, op in enumerate(ops):
        for value in op.results:
            if value in last:
                # It takes the place of one that ends here.
                ends = [held for held in live if last[held] == n]
                stays = isinstance(op, Take) or (repeated and value not in split)
                for gone in [] if stays else ends[:1]:
                    del live[gone]
                live[value] = _size(value, op, kernel) * (2 if value in split else 1)
        inside = _inside(op, kernel, repeated, in_line)
        if op.regions and not kernel.in_line(op):
            loops, inside = max(loops, inside), 0
        most = max(most, sum(live.values()) + inside + _copied(op, made, kernel))
        live = {v: size for v, size in live.items() if last[v] > n}
    return most + loops + sum(_passed(op, made, kernel) for op in ops if isinstance(op, Switch))


def _passed(op: Switch, made: Mapping[Value, Op], kernel: _Kernel) -> int:
    """What a switch gives, and the tiles from around it that it takes: nothing else takes their place."""
    inside = {v for region in op.regions for inner in region.walk() for v in inner.operands}
    taken = [(v, made[v]) for v in inside if v in made and not isinstance(made[v], (Constant, Iota))]
    tiles = [*taken, *((v, op) for v in op.results)]
    return sum(_size(v, by, kernel) for v, by in tiles if len(v.tile.shape) > 1)


def _inside(op: Op, kernel: _Kernel, repeated: bool, in_line: int) -> int:
    """What values inside of an op take. Of iterations in one stretch of code, operands of dots are there at once."""
    if not isinstance(op, Fold):
        return max((_spilled(region, kernel, repeated) for region in op.regions), default=0)
    found = kernel.rounds_of(op)
    most = _spilled(op.body, kernel, found.repeated)
    at_once = found.at_once if found.repeated else in_line
    made = {r: inner for inner in op.body.ops for r in inner.results}
    for inner in op.body.ops:
        if isinstance(inner, Dot) and at_once > 1:
            computed = sum(_size(v, made[v], kernel) for v in {*inner.operands} if _is_kept(v, made))
            copies = _copied(inner, made, kernel)
            most += (at_once - 1) * (computed + copies) if computed else copies
    return most


def _copied(op: Op, made: Mapping[Value, Op], kernel: _Kernel) -> int:
    """What a dot copies of its left operand.

    Float32 is cut into three narrow parts, which take as much as four copies with the operand itself (measured: 4.0 to
    4.9). Of what is loaded and multiplied with one stretch of columns, only the parts of both operands for one pass
    through the matrix units are there at a time.

    Others stay in registers, unless they pass through the matrix units many times in depth, and for several stretches
    of columns. Chips with units of 256 copy them only where a row of the block takes a multiple of eight tiles.
    """
    if not isinstance(op, Dot):
        return 0
    lhs, there, once = op.operands[0].tile, _is_kept(op.operands[0], made), _is_once(op, kernel.chip)
    size, unit = padded_bytes(lhs.shape, lhs.dtype), kernel.chip.matrix_size
    if size <= _SMALL or (there and once):
        return 0
    if lhs.dtype == F32 and op.precision in _PARTS:
        parts, rows = _PARTS[op.precision], prod(lhs.shape[d] for d in op.free(0))
        copies = (parts + (not there)) * size
        return min(copies, parts * (rows + unit) * unit * 4) if once else copies
    depth = prod(lhs.shape[d] for d in op.contract[0])
    banked = unit == LANES or _in_one_bank(op.operands[0], made, kernel)
    return 0 if there or once or depth < 4 * unit or not banked else size


def _is_once(op: Dot, chip: Chip) -> bool:
    """Whether the left operand is multiplied with one stretch of columns."""
    return prod(op.operands[1].tile.shape[d] for d in op.free(1)) <= _STRETCH.get(chip.name, chip.matrix_size)


def _split(block: Block, chip: Chip) -> set[Value]:
    """Weights of float32 that are cut into parts while logits are still on their way: they take twice their size."""
    dots = [op for op in block.ops if isinstance(op, Dot) and op.operands[0].tile.dtype == F32 and _is_once(op, chip)]
    return {op.operands[0] for op in dots if op.precision in _PARTS} & _multiplied(block)


def _multiplied(block: Block) -> set[Value]:
    """What dots of a block give, and all that follows from it."""
    found = set[Value]()
    for op in block.ops:
        if isinstance(op, Dot) or not found.isdisjoint(op.operands):
            found.update(op.results)
    return found


def _in_one_bank(value: Value, made: Mapping[Value, Op], kernel: _Kernel) -> bool:
    """Whether a row of the block that a value is loaded from takes a multiple of eight tiles (measured)."""
    load = made.get(value)
    found = kernel.layouts.get(load) if isinstance(load, Load) else None
    return (found.buffer if found else value.tile.shape)[-1] % (8 * LANES) == 0


def _last_uses(block: Block, kernel: _Kernel) -> dict[Value, int]:
    """The values that are in VMEM, and the number of the op by which all is computed that is streamed from them."""
    uses: dict[Value, list[int]] = {}
    for n, op in enumerate(block.ops):
        for value in op.operands:
            uses.setdefault(value, []).append(n)
    kept = _kept(block, kernel)
    ends: dict[Value, int] = {}

    def end(value: Value) -> int:
        if value not in ends:
            found = 0
            for n in uses.get(value, ()):
                op = block.ops[n]
                streams = not isinstance(op, _BARRIERS) and not op.regions
                onward = [end(r) for r in op.results if streams and r not in kept]
                found = max(found, n, *onward)
            ends[value] = found
        return ends[value]

    return {value: end(value) for value in kept}


def _kept(block: Block, kernel: _Kernel) -> set[Value]:
    made = {r: op for op in block.ops for r in op.results}
    above: dict[Value, frozenset[Value]] = {}  # the tiles that a value is computed from
    reduced: dict[Value, frozenset[Value]] = {}  # those that reductions it depends on are of
    multiplied, split = _multiplied(block), _split(block, kernel.chip)
    found = set[Value]()
    for op in block.ops:
        of = frozenset[Value]().union(*(reduced.get(v, frozenset()) for v in op.operands))
        large = frozenset(v for v in op.operands if _is_kept(v, made) or _is_wide(v, made))
        # Rows of a register are done one after the other, but not those that matrix units give.
        found.update(v for v in large if v in of and (v.tile.shape[-1] > LANES or v in multiplied))
        if isinstance(op, Dot):
            found.update(v for v in op.operands if _is_kept(v, made, _SMALL // 2 if v in split else _SMALL))
        found.update(v for v in _kept_by_itself(op, bool(of)) if _size(v, made.get(v, op), kernel) > _SMALL)
        sources = large.union(*(above.get(v, frozenset()) for v in op.operands))
        for result in op.results:
            above[result] = sources
            reduced[result] = of | sources if isinstance(op, _BARRIERS) else of
    return found


def _kept_by_itself(op: Op, follows: bool) -> Sequence[Value]:
    """What an op needs or makes as a whole whatever is done with it; `follows` says whether from a reduction."""
    match op:
        case Reshape() | Transpose():
            tile = op.result.tile
            return op.results if padded_bytes(tile.shape, tile.dtype) > 4 * tile.nbytes else ()
        case Convert():
            return op.results if follows and _is_packed_row(op) else ()
        case Load(access=access) if access.dims and op.result.tile.dtype.itemsize < 4:
            start = access.dims[-1].position.const
            return op.results if start % LANES or (start and len(op.result.tile.shape) > 2) else ()
        case Broadcast():
            return op.results if _repeats_rows(op) else ()
        case Take():
            return (op.operands[0], op.result)
        case _:
            return ()


def _repeats_rows(op: Op) -> bool:
    """Whether an op puts a dim between those of a tile's rows and lanes."""
    return isinstance(op, Broadcast) and len(op.dims) > 1 and op.dims[-2:] == (len(op.shape) - 3, len(op.shape) - 1)


def _is_packed_row(op: Op) -> bool:
    return isinstance(op, Convert) and op.result.tile.shape[:-1] == (1,) and op.result.tile.dtype.itemsize == 2


def _is_kept(value: Value, made: Mapping[Value, Op], small: int = _SMALL) -> bool:
    """Whether a value is a large tile that is computed here."""
    op = made.get(value)
    if op is None or len(value.tile.shape) < 2 or padded_bytes(value.tile.shape, value.tile.dtype) <= small:
        return False
    while isinstance(op, _VIEWS):
        op = made.get(op.operands[0])
    return op is not None and not isinstance(op, _FREE)


def _is_wide(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a value is a large tile that is loaded here, its rows too long for registers: most stays."""
    if not isinstance(made.get(value), Load):
        return False
    shape = value.tile.shape
    return len(shape) > 1 and shape[-1] > _IN_REGISTERS and padded_bytes(shape, value.tile.dtype) > _SMALL


def _size(value: Value, made: Op, kernel: _Kernel) -> int:
    """What a value takes: of a tile of more than two dims whole registers, of what is moved between lanes 32 bits.

    A packed row fills a quarter of its registers, half on chips with vectors of bfloat16. Of what is loaded, long rows
    are loaded again in part (measured: 5 % to all of it). Of a triangle, 58 to 84 % is there (measured).
    """
    shape, dtype = value.tile.shape, F32 if isinstance(made, Load) else value.tile.dtype
    if _repeats_rows(made):
        shape = (*shape[:-2], SUBLANES, shape[-1])
    if len(shape) > 2 and not isinstance(made, Reshape):
        shape = (*shape[:-2], -(-shape[-2] // SUBLANES) * SUBLANES, shape[-1])
    size = padded_bytes(shape, dtype)
    if _is_packed_row(made):
        return size * (2 if kernel.chip.bf16_vectors else 4)
    if isinstance(made, Select) and made.operands[0] in kernel.triangles:
        return size * 2 // 3
    return size * 3 // 4 if _is_wide(value, {value: made}) else size


def _triangles(body: Block) -> frozenset[Value]:
    """Masks that compare rows with columns, of numbers that are known."""
    dims: dict[Value, frozenset[int]] = {}  # those along which known values differ
    for op in body.walk():
        match op:
            case Constant():
                dims[op.result] = frozenset()
            case Iota():
                dims[op.result] = frozenset({op.dim})
            case Broadcast(operands=(x,)) if x in dims:
                dims[op.result] = frozenset(op.dims[d] for d in dims[x])
            case Elementwise() if all(x in dims for x in op.operands):
                dims[op.result] = frozenset[int]().union(*(dims[x] for x in op.operands))
            case _:
                pass
    return frozenset(v for v, found in dims.items() if v.tile.dtype == BOOL and found == frozenset((0, 1)))
