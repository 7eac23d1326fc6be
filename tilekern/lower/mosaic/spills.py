"""Which values of a kernel go through VMEM, beside the blocks and carries that are there anyway.

Mosaic computes elementwise chains register by register, so most tiles never exist as a whole. These do:

    the operand of a dot that is computed, for the matrix unit wants it as a whole
    the left operand of a dot, though loaded, if it is multiplied with several stretches of columns
    a tile that is used again by what depends on a reduction of it: logits, first for their maximum, then for exp(s - m)
    a tile of few lanes that a reshape or a transposition makes, for these go through memory
    a sine or cosine and what it is of, for both are long to compute; and what is loaded from between the lanes

This is an estimate; tests/lower/mosaic/test_library.py holds it against what libtpu reports for kernels of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilekern.ir.compute import Constant, Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import F32
from tilekern.lower.mosaic.chip import LANES, SUBLANES, Chip, padded_bytes
from tilekern.lower.mosaic.unroll import Rounds

_PARTS = {"ieee": 3, "bf16x6": 3, "bf16x3": 2}
_IN_STRETCHES = {"tpu:7x": (512, 4 << 20)}  # chips that cut rows into stretches, for at most so many columns; bytes
_SMALL = 208 << 10  # fits the registers
_IN_REGISTERS = 16 * LANES  # columns of eight rows that fit them
_MOST_OPS = 2000
_FREE = (Constant, Iota, Load)  # read or made again where they are used
_BARRIERS = (Reduce, ArgReduce, Dot)
_VIEWS = (Transpose, Reshape, Broadcast)


def spilled_bytes(block: Block, chip: Chip, rounds: Mapping[Fold, Rounds], repeated: bool = False) -> int:
    """The most bytes of VMEM that values of a block take at once, those of blocks inside included.

    Args:
      block: ops.
      chip: the TPU.
      rounds: how loops are written out.
      repeated: whether the block is that of a loop, whose values do not take each other's place.
    """
    ops = block.ops
    made = {r: op for op in ops for r in op.results}
    inside = [_inside(op, chip, rounds, repeated) + _copied(op, made, chip) for op in ops]
    last = _last_uses(block) if len(ops) <= _MOST_OPS else dict[Value, int]()
    most, live = 0, dict[Value, int]()
    for n, op in enumerate(ops):
        for value in op.results:
            if value in last:
                size = _size(value, op)
                # It takes the place of one that ends here.
                ends = [held for held in live if last[held] == n and live[held] >= size]
                for gone in [] if repeated or isinstance(op, Reshape | Transpose) else ends[:1]:
                    del live[gone]
                live[value] = size
        most = max(most, sum(live.values()) + inside[n])
        live = {v: size for v, size in live.items() if last[v] > n}
    return most


def _inside(op: Op, chip: Chip, rounds: Mapping[Fold, Rounds], repeated: bool) -> int:
    """What values inside of an op take. Of iterations of one round, operands of dots are there at once."""
    found = rounds.get(op, Rounds()) if isinstance(op, Fold) else Rounds(1, repeated)
    most = max((spilled_bytes(region, chip, rounds, found.repeated) for region in op.regions), default=0)
    if not isinstance(op, Fold) or not found.repeated or found.at_once == 1:
        return most
    made = {r: inner for inner in op.body.ops for r in inner.results}
    for inner in op.body.ops:
        if isinstance(inner, Dot):
            computed = sum(_size(v, made[v]) for v in {*inner.operands} if _is_kept(v, made))
            copies = _copied(inner, made, chip)
            most += (found.at_once - 1) * (computed + copies) if computed else copies
    return most


def _copied(op: Op, made: Mapping[Value, Op], chip: Chip) -> int:
    """What a dot copies of its left operand.

    Float32 is cut into three narrow parts, which take as much as four copies with the operand itself (measured: 4.0 to
    4.9), but for what is computed and multiplied once; on 7x, for up to 512 columns, only 1 to 3 MiB of them are there
    at a time (measured). Others stay in registers, unless they pass through the matrix units many times in depth, and
    for several stretches of columns.
    """
    if not isinstance(op, Dot):
        return 0
    lhs, rhs = (v.tile for v in op.operands)
    size = padded_bytes(lhs.shape, lhs.dtype)
    if size <= _SMALL:
        return 0
    there = _is_kept(op.operands[0], made)
    once = prod(rhs.shape[d] for d in op.free(1)) <= LANES  # the operand is multiplied with one stretch of columns
    if lhs.dtype == F32 and op.precision in _PARTS:
        copies = 0 if there and once else (_PARTS[op.precision] + (not there)) * size
        columns, most = _IN_STRETCHES.get(chip.name, (0, 0))
        return min(copies, most) if prod(rhs.shape[d] for d in op.free(1)) <= columns else copies
    depth = prod(lhs.shape[d] for d in op.contract[0])
    return 0 if there or once or depth < 4 * chip.matrix_size else size


def _last_uses(block: Block) -> dict[Value, int]:
    """The values that are in VMEM, and the number of the op by which all is computed that is streamed from them."""
    uses: dict[Value, list[int]] = {}
    for n, op in enumerate(block.ops):
        for value in op.operands:
            uses.setdefault(value, []).append(n)
    kept = _kept(block)
    ends: dict[Value, int] = {}

    def end(value: Value) -> int:
        if value not in ends:
            found = 0
            for n in uses.get(value, ()):
                op = block.ops[n]
                streams = not isinstance(op, _BARRIERS) and not op.regions
                onward = [end(r) for r in op.results if streams and (r not in kept or _is_long(op))]
                found = max(found, n, *onward)
            ends[value] = found
        return ends[value]

    return {value: end(value) for value in kept}


def _kept(block: Block) -> set[Value]:
    made = {r: op for op in block.ops for r in op.results}
    above: dict[Value, frozenset[Value]] = {}  # the tiles that a value is computed from
    reduced: dict[Value, frozenset[Value]] = {}  # those that reductions it depends on are of
    found = set[Value]()
    for op in block.ops:
        of = frozenset[Value]().union(*(reduced.get(v, frozenset()) for v in op.operands))
        large = frozenset(v for v in op.operands if _is_kept(v, made) or _is_wide(v, made))
        found.update(v for v in large if v in of and v.tile.shape[-1] > LANES)
        found.update(v for v in large if isinstance(op, Dot) and _is_kept(v, made))
        if isinstance(op, Reshape | Transpose):
            size = padded_bytes(op.result.tile.shape, op.result.tile.dtype)
            if size > max(_SMALL, 4 * op.result.tile.nbytes):
                found.add(op.result)
        elif _is_long(op):
            found.update(v for v in (*op.operands, op.result) if _size(v, op) > _SMALL)
        elif isinstance(op, Load) and op.access.dims and op.access.dims[-1].position.const % LANES:
            found.update(v for v in op.results if _size(v, op) > _SMALL)
        sources = large.union(*(above.get(v, frozenset()) for v in op.operands))
        for result in op.results:
            above[result] = sources
            reduced[result] = of | sources if isinstance(op, _BARRIERS) else of
    return found


def _is_long(op: Op) -> bool:
    return isinstance(op, Elementwise) and op.function in ("sin", "cos")


def _is_kept(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a value is a large tile that is computed here."""
    op = made.get(value)
    if op is None or len(value.tile.shape) < 2 or padded_bytes(value.tile.shape, value.tile.dtype) <= _SMALL:
        return False
    while isinstance(op, _VIEWS):
        op = made.get(op.operands[0])
    return op is not None and not isinstance(op, _FREE)


def _is_wide(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a value is a large tile that is loaded here, its rows too long for registers: it is not loaded again."""
    if not isinstance(made.get(value), Load):
        return False
    shape = value.tile.shape
    return len(shape) > 1 and shape[-1] > _IN_REGISTERS and padded_bytes(shape, value.tile.dtype) > _SMALL


def _size(value: Value, made: Op) -> int:
    """What a value takes: of a tile of more than two dims whole registers, of what is moved between lanes 32 bits."""
    shape, dtype = value.tile.shape, F32 if isinstance(made, Load) else value.tile.dtype
    if len(shape) > 2 and not isinstance(made, Reshape | Transpose):
        shape = (*shape[:-2], -(-shape[-2] // SUBLANES) * SUBLANES, shape[-1])
    return padded_bytes(shape, dtype)
