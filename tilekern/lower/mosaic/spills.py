"""Which values of a kernel go through VMEM, beside the blocks and carries that are there anyway.

Mosaic computes elementwise chains register by register, so most tiles never exist as a whole. Three kinds do:

    the operand of a dot that is computed, for the matrix unit wants it as a whole
    a tile that is used again by what depends on a reduction of it: logits, first for their maximum, then for exp(s - m)
    a tile of few lanes that a reshape or a transposition makes, for these go through memory

This is an estimate; tests/lower/mosaic/test_library.py holds it against what libtpu reports for kernels of the library.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.compute import Constant, Dot, Reduce
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.lower.mosaic.chip import padded_bytes

_SMALL = 64 << 10  # fits the registers
_MOST_OPS = 2000
_FREE = (Constant, Iota, Load)  # read or made again where they are used
_BARRIERS = (Reduce, ArgReduce, Dot)
_VIEWS = (Transpose, Reshape, Broadcast)


def spilled_bytes(block: Block) -> int:
    """The most bytes of VMEM that values of a block take at once, those of blocks inside included."""
    ops = block.ops
    inside = [max((spilled_bytes(region) for region in op.regions), default=0) for op in ops]
    last = _last_uses(block) if len(ops) <= _MOST_OPS else dict[Value, int]()
    most, live = 0, dict[Value, int]()
    for n, op in enumerate(ops):
        for value in op.results:
            if value in last:
                live[value] = size = padded_bytes(value.tile.shape, value.tile.dtype)
                # It takes the place of one of its size that ends here.
                same = (v for v, held in live.items() if v is not value and last[v] == n and held == size)
                over = [] if isinstance(op, Reshape | Transpose) else list(same)
                for gone in over[:1]:
                    del live[gone]
        most = max(most, sum(live.values()) + inside[n])
        live = {v: size for v, size in live.items() if last[v] > n}
    return most


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
                onward = [end(r) for r in op.results if streams and r not in kept]
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
        large = frozenset(v for v in op.operands if _is_kept(v, made))
        found.update(v for v in large if isinstance(op, Dot) or v in of)
        if isinstance(op, Reshape | Transpose):
            size = padded_bytes(op.result.tile.shape, op.result.tile.dtype)
            if size > max(_SMALL, 4 * op.result.tile.nbytes):
                found.add(op.result)
        sources = large.union(*(above.get(v, frozenset()) for v in op.operands))
        for result in op.results:
            above[result] = sources
            reduced[result] = of | sources if isinstance(op, _BARRIERS) else of
    return found


def _is_kept(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a value is a large tile that is computed here."""
    op = made.get(value)
    if op is None or len(value.tile.shape) < 2 or padded_bytes(value.tile.shape, value.tile.dtype) <= _SMALL:
        return False
    while isinstance(op, _VIEWS):
        op = made.get(op.operands[0])
    return op is not None and not isinstance(op, _FREE)
