"""Estimate of the VMEM that values of a kernel take, in addition to blocks and carries.

`register_pressure.py` finds the values that do not stay in registers, and their sizes. This module finds how long they
live, and how many bytes are live at once. Tests compare the estimate with the sizes that libtpu reports:
tests/lower/mosaic/test_library.py for kernels of the library, plan/test_vmem_of_random_tiles.py for random kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from tilekern.ir.compute import Constant, Dot
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Op, Value, round_up
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, F32
from tilekern.lower.mosaic.calibration import (
    BANKED_TILES,
    MANY_PASSES,
    MAX_ESTIMATED_OPS,
    REGISTER_TILE_BYTES,
    REGISTER_VALUES,
)
from tilekern.lower.mosaic.chip import LANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.dot_operands import (
    BF16_PARTS,
    SharedOperand,
    is_one_column_pass,
    shared_operands,
    split_operands,
    viewed_tile,
)
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.register_pressure import captured_values, vmem_values
from tilekern.lower.mosaic.plan.unroll import Unrolling
from tilekern.lower.mosaic.plan.value_sizes import KernelContext, is_computed, is_streamed, value_bytes


def spilled_bytes(
    body: Block, chip: Chip, unrollings: Mapping[Fold, Unrolling], layouts: Mapping[MemoryOp, Layout | None]
) -> int:
    """The most bytes of VMEM that values of a kernel take at once.

    Args:
      body: the ops of the kernel.
      chip: the TPU.
      unrollings: the unrolling of each loop.
      layouts: the layout of each access's array.
    """
    most = _block_bytes(body, KernelContext(chip, unrollings, layouts, _triangles(body)), in_loop=False)
    return most if any(isinstance(op, Dot) for op in body.walk()) else max(0, most - REGISTER_VALUES)


def _block_bytes(block: Block, kernel: KernelContext, in_loop: bool) -> int:
    """The most bytes that values of a block take at once, plus the bytes of its largest loop.

    Loops have memory of their own, which they share with each other but not with the block. Within a block, a value
    takes the memory of a value that dies at its op. Inside of a loop (`in_loop`) only parts of a split operand do so.
    """
    ops = block.ops
    producers = {r: op for op in ops for r in op.results}
    sizes = vmem_values(block, kernel) if len(ops) <= MAX_ESTIMATED_OPS else dict[Value, int]()
    last, parts = _last_uses(block, sizes), split_operands(block, kernel.chip)
    shared = shared_operands(block, kernel.chip)
    unrolled_iterations = sum(kernel.unrolling_of(op).factor for op in ops if kernel.is_unrolled(op))
    most = loops = 0
    live = {v: sizes[v] for v in block.args if v in last}
    for n, op in enumerate(ops):
        for value in op.results:
            if value in last:
                ends = [held for held in live if last[held] == n]
                stays = isinstance(op, Take) or (in_loop and value not in parts)
                for gone in [] if stays else ends[:1]:
                    del live[gone]
                live[value] = sizes[value] * (2 if value in parts else 1)
        inside = _region_bytes(op, kernel, in_loop, unrolled_iterations)
        if op.regions and not kernel.is_unrolled(op):
            loops, inside = max(loops, inside), 0
        shared_bytes = sum(s.size - live.get(v, 0) for v, s in shared.items() if s.first <= n <= s.last)
        most = max(most, sum(live.values()) + shared_bytes + inside + _dot_copy_bytes(op, producers, shared, kernel))
        live = {v: size for v, size in live.items() if last[v] > n}
    return most + loops + sum(_switch_bytes(op, producers, kernel) for op in ops if isinstance(op, Switch))


def _switch_bytes(op: Switch, producers: Mapping[Value, Op], kernel: KernelContext) -> int:
    """The bytes of a switch's results and of the tiles that it captures: no other value takes their memory."""
    inside = {v for region in op.regions for inner in region.walk() for v in inner.operands}
    taken = [(v, producers[v]) for v in inside if v in producers and not isinstance(producers[v], (Constant, Iota))]
    tiles = [*taken, *((v, op) for v in op.results)]
    return sum(value_bytes(v, by, kernel) for v, by in tiles if len(v.tile.shape) > 1)


def _region_bytes(op: Op, kernel: KernelContext, in_loop: bool, unrolled_iterations: int) -> int:
    """The bytes of values in an op's regions.

    The computed operands of dots of all unrolled iterations are live at once, also of several loops. A loaded operand
    is copied when its dot runs: two iterations of one loop have their copies at once, two loops do not.
    """
    if not isinstance(op, Fold):
        return max((_block_bytes(region, kernel, in_loop) for region in op.regions), default=0)
    unrolling = kernel.unrolling_of(op)
    most = _block_bytes(op.body, kernel, unrolling.is_loop)
    factor = unrolling.factor if unrolling.is_loop else unrolled_iterations
    producers = {r: inner for inner in op.body.ops for r in inner.results}
    shared = shared_operands(op.body, kernel.chip)
    if unrolling.is_loop:
        most += (factor - 1) * sum(s.size for s in shared.values())
    for inner in op.body.ops:
        if isinstance(inner, Dot) and factor > 1:
            lhs = inner.operands[0]
            computed = value_bytes(lhs, producers[lhs], kernel) if is_computed(lhs, producers) else 0
            copies = _dot_copy_bytes(inner, producers, shared, kernel)
            if computed:
                most += (factor - 1) * (computed + copies)
            elif unrolling.factor > 1:
                most += copies
    return most


def _dot_copy_bytes(
    op: Op, producers: Mapping[Value, Op], shared: Mapping[Value, SharedOperand], kernel: KernelContext
) -> int:
    """The bytes of the copies that a dot makes of its left operand.

    A float32 operand is split into narrow parts: three parts and the operand take four times its size (measured: 4.0
    to 4.9). If the operand is loaded, and the columns of the right operand fit one pass, only the parts of both
    operands for one pass through the matrix units are live at a time.

    Other operands are copied only if their depth takes four passes or more, and the columns take several. Chips with
    matrix units of 256 copy them only where a row of the block takes a multiple of eight tiles.
    """
    if not isinstance(op, Dot) or viewed_tile(op.operands[0], producers) in shared:
        return 0
    lhs, computed = op.operands[0].tile, is_computed(op.operands[0], producers)
    one_pass = is_one_column_pass(op, kernel.chip)
    size, unit = padded_bytes(lhs.shape, lhs.dtype), kernel.chip.matrix_size
    if size <= REGISTER_TILE_BYTES or (computed and one_pass):
        return 0
    if lhs.dtype == F32 and op.precision in BF16_PARTS:
        parts, rows = BF16_PARTS[op.precision], prod(lhs.shape[d] for d in op.free(0))
        copies = (parts + (not computed)) * size
        return min(copies, parts * (rows + unit) * unit * 4) if one_pass else copies
    depth = round_up(prod(lhs.shape[d] for d in op.contract[0]), LANES)
    banked = unit == LANES or _has_bank_conflict(op.operands[0], producers, kernel)
    return 0 if computed or one_pass or depth < MANY_PASSES * unit or not banked else size


def _has_bank_conflict(value: Value, producers: Mapping[Value, Op], kernel: KernelContext) -> bool:
    """True if a row of the block that a value is loaded from takes a multiple of eight tiles (measured)."""
    load = producers.get(value)
    layout = kernel.layouts.get(load) if isinstance(load, Load) else None
    return (layout.buffer if layout else value.tile.shape)[-1] % (BANKED_TILES * LANES) == 0


def _last_uses(block: Block, vmem_values: Collection[Value]) -> dict[Value, int]:
    """For each value in VMEM, the number of the last op that reads it, directly or through streamed values.

    A streamed value is not in VMEM itself: each of its uses computes it again, and reads the value in VMEM again.
    """
    uses: dict[Value, list[int]] = {}
    for n, op in enumerate(block.ops):
        for value in {*op.operands, *captured_values(op)}:
            uses.setdefault(value, []).append(n)
    ends: dict[Value, int] = {}

    def end(value: Value) -> int:
        if value not in ends:
            last = 0
            for n in uses.get(value, ()):
                op = block.ops[n]
                onward = [end(r) for r in op.results if is_streamed(op) and r not in vmem_values]
                last = max(last, n, *onward)
            ends[value] = last
        return ends[value]

    return {value: end(value) for value in vmem_values}


def _triangles(body: Block) -> frozenset[Value]:
    """Masks that compare row numbers with column numbers, such as a causal mask: the compiler knows their zeros."""
    dims: dict[Value, frozenset[int]] = {}  # the dims along which compile-time values vary
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
    return frozenset(v for v, varying in dims.items() if v.tile.dtype == BOOL and varying == frozenset((0, 1)))
