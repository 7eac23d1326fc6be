"""Which values of a kernel go through VMEM, beside the blocks and carries that are there anyway.

`kept.py` says which values these are and what each one takes; here is when they are there, and what is there at once.

This is an estimate; tests/lower/mosaic/test_library.py holds it against what libtpu reports for kernels of
the library, test_random_tiles.py for random ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from tilekern.ir.compute import Constant, Dot, Reduce
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, F32
from tilekern.lower.mosaic.chip import LANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.register_pressure import (
    PARTS,
    SMALL,
    Kernel,
    Shared,
    captured,
    is_computed,
    is_once,
    kept,
    root_of,
    shared,
    size_of,
    split,
)
from tilekern.lower.mosaic.plan.unroll import Rounds

_BARRIERS = (Reduce, ArgReduce, Dot)
_HELD = 124 << 10  # what stays in registers, where no dots need them (measured: 92 to 170)
_MOST_OPS = 2000


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
    most = _spilled(body, Kernel(chip, rounds, layouts, _triangles(body)), repeated=False)
    return most if any(isinstance(op, Dot) for op in body.walk()) else max(0, most - _HELD)


def _spilled(block: Block, kernel: Kernel, repeated: bool) -> int:
    """The most that values of a block take, and of its loops: those have theirs beside it, though not at the same time.

    Only within one stretch of code do values take each other's place, and in that of a loop (`repeated`) only the parts
    of an operand do.
    """
    ops = block.ops
    made = {r: op for op in ops for r in op.results}
    sizes = kept(block, kernel) if len(ops) <= _MOST_OPS else dict[Value, int]()
    last, parts, together = _last_uses(block, sizes), split(block, kernel.chip), shared(block)
    in_line = sum(kernel.rounds_of(op).at_once for op in ops if kernel.in_line(op))
    most = loops = 0
    live = {v: sizes[v] for v in block.args if v in last}
    for n, op in enumerate(ops):
        for value in op.results:
            if value in last:
                # It takes the place of one that ends here.
                ends = [held for held in live if last[held] == n]
                stays = isinstance(op, Take) or (repeated and value not in parts)
                for gone in [] if stays else ends[:1]:
                    del live[gone]
                live[value] = sizes[value] * (2 if value in parts else 1)
        inside = _inside(op, kernel, repeated, in_line)
        if op.regions and not kernel.in_line(op):
            loops, inside = max(loops, inside), 0
        beside = sum(s.size - live.get(v, 0) for v, s in together.items() if s.first <= n <= s.last)
        most = max(most, sum(live.values()) + beside + inside + _copied(op, made, together, kernel))
        live = {v: size for v, size in live.items() if last[v] > n}
    return most + loops + sum(_passed(op, made, kernel) for op in ops if isinstance(op, Switch))


def _passed(op: Switch, made: Mapping[Value, Op], kernel: Kernel) -> int:
    """What a switch gives, and the tiles from around it that it takes: nothing else takes their place."""
    inside = {v for region in op.regions for inner in region.walk() for v in inner.operands}
    taken = [(v, made[v]) for v in inside if v in made and not isinstance(made[v], (Constant, Iota))]
    tiles = [*taken, *((v, op) for v in op.results)]
    return sum(size_of(v, by, kernel) for v, by in tiles if len(v.tile.shape) > 1)


def _inside(op: Op, kernel: Kernel, repeated: bool, in_line: int) -> int:
    """What values inside of an op take. Of iterations in one stretch of code, operands of dots are there at once."""
    if not isinstance(op, Fold):
        return max((_spilled(region, kernel, repeated) for region in op.regions), default=0)
    found = kernel.rounds_of(op)
    most = _spilled(op.body, kernel, found.repeated)
    at_once = found.at_once if found.repeated else in_line
    made, together = {r: inner for inner in op.body.ops for r in inner.results}, shared(op.body)
    if found.repeated:
        most += (at_once - 1) * sum(s.size for s in together.values())
    for inner in op.body.ops:
        if isinstance(inner, Dot) and at_once > 1:
            lhs = inner.operands[0]
            computed = size_of(lhs, made[lhs], kernel) if is_computed(lhs, made) else 0
            copies = _copied(inner, made, together, kernel)
            most += (at_once - 1) * (computed + copies) if computed else copies
    return most


def _copied(op: Op, made: Mapping[Value, Op], together: Mapping[Value, Shared], kernel: Kernel) -> int:
    """What a dot copies of its left operand.

    Float32 is cut into three narrow parts, which take as much as four copies with the operand itself (measured: 4.0 to
    4.9). Of what is loaded and multiplied with one stretch of columns, only the parts of both operands for one pass
    through the matrix units are there at a time.

    Others stay in registers, unless they pass through the matrix units many times in depth, and for several stretches
    of columns. Chips with units of 256 copy them only where a row of the block takes a multiple of eight tiles.
    """
    if not isinstance(op, Dot) or root_of(op.operands[0], made) in together:
        return 0
    lhs, there, once = op.operands[0].tile, is_computed(op.operands[0], made), is_once(op, kernel.chip)
    size, unit = padded_bytes(lhs.shape, lhs.dtype), kernel.chip.matrix_size
    if size <= SMALL or (there and once):
        return 0
    if lhs.dtype == F32 and op.precision in PARTS:
        parts, rows = PARTS[op.precision], prod(lhs.shape[d] for d in op.free(0))
        copies = (parts + (not there)) * size
        return min(copies, parts * (rows + unit) * unit * 4) if once else copies
    depth = -(-prod(lhs.shape[d] for d in op.contract[0]) // LANES) * LANES
    banked = unit == LANES or _in_one_bank(op.operands[0], made, kernel)
    return 0 if there or once or depth < 4 * unit or not banked else size


def _in_one_bank(value: Value, made: Mapping[Value, Op], kernel: Kernel) -> bool:
    """Whether a row of the block that a value is loaded from takes a multiple of eight tiles (measured)."""
    load = made.get(value)
    found = kernel.layouts.get(load) if isinstance(load, Load) else None
    return (found.buffer if found else value.tile.shape)[-1] % (8 * LANES) == 0


def _last_uses(block: Block, kept: Collection[Value]) -> dict[Value, int]:
    """The values that are in VMEM, and the number of the op by which all is computed that is streamed from them."""
    uses: dict[Value, list[int]] = {}
    for n, op in enumerate(block.ops):
        for value in {*op.operands, *captured(op)}:
            uses.setdefault(value, []).append(n)
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
