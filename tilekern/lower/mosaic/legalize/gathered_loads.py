"""Write loads of many gathered lanes as loads of blocks, of which the lanes are taken.

Mosaic reads gathered lanes one by one, each by a dozen operations or more: a Toeplitz matrix of 128 × 128 lanes of a
vector became 262,144. Vector registers take many lanes at once.

    load x[gather v]  →  select(0 <= v < n, take(load x[0 +: n], v), fill)

Needs: a Func after `separate_index_vectors`. Gives: a Func whose gathered loads are of few lanes, of arrays that other
programs may write, of large blocks, or at positions that may not fit int32; these stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from math import prod

from tilekern.ir.analysis.ranges import Interval, analyze, update
from tilekern.ir.core import Func, Op, Value, round_up
from tilekern.ir.dynamic import Take
from tilekern.ir.make import Make
from tilekern.ir.memory import Dim, Load, Position
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Reshape
from tilekern.ir.types import F32
from tilekern.lower.mosaic.calibration import MAX_GATHERED_ROWS, MAX_TAKEN_BYTES
from tilekern.lower.mosaic.chip import LANES, SUBLANES, padded_bytes
from tilekern.lower.mosaic.legalize.places import fits_int32, inside, places, with_dims


def take_gathers(func: Func) -> Func:
    """Apply the rewrite above."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        return [_taken(op, rewriter)] if isinstance(op, Load) and _is_cheaper(op, ranges) else None

    return Rewriter(rule).run(func)


def _gathers(op: Load) -> list[int]:
    """The dims of the array that are gathered."""
    return [n for n, dim in enumerate(op.access.dims) if dim.kind == "gather"]


def _is_cheaper(op: Load, ranges: Mapping[Value, Interval]) -> bool:
    """True for many lanes of small blocks, which takes fewer operations to take than `OPS_PER_ROW` for each lane.

    For 128 lanes each register of the block, of 4 KiB, is gathered from, compared, and selected: three operations. A
    block of 1 MiB takes 768 operations, six a lane.
    """
    gathers, sizes = _gathers(op), [dim.size for dim in op.access.dims]
    if prod(sizes[n] for n in gathers) <= MAX_GATHERED_ROWS or op.ref.ref.role != "in" or 0 in op.extents:
        return False
    for n in gathers:
        sizes[n] = op.extents[n]
    for n in gathers:
        rows = round_up(prod(sizes) // sizes[n], SUBLANES)
        if padded_bytes((rows, sizes[n]), F32) > MAX_TAKEN_BYTES or not fits_int32(op, n, ranges):
            return False
        sizes[n] = op.access.dims[n].size
    return True


def _taken(op: Load, rewriter: Rewriter) -> Value:
    """The result of a load, taken from its block."""
    make = Make(rewriter, op)
    operands, shape = _index_tiles(op, rewriter)
    x, keep = _block(make, op), [] if op.mask is None else [make.reshape(op.mask, shape)]
    for n in _gathers(op):
        dim, lane = op.access.dims[n], op.access.lanes[n]
        assert lane is not None
        dims = (lane,) if shape == op.access.shape else tuple(range(len(shape)))
        place = places(make, dim, operands, tuple(shape[d] for d in dims))
        x = make.add(Take, x, place, dim=lane)
        if not dim.in_bounds:
            keep.append(make.broadcast(inside(make, place, op.extents[n]), shape, dims))
    if keep:
        fill = 0 if op.fill is None else make.broadcast(op.fill, shape, ())
        x = make.select(reduce(partial(make.of, "and"), keep), x, fill)
    return make.reshape(x, op.access.shape)


def _index_tiles(op: Load, rewriter: Rewriter) -> tuple[Sequence[Value], tuple[int, ...]]:
    """The operands of the positions, and the shape in which the lanes are taken.

    The shape is the access's own, unless all lanes go along one index vector that is a reshaped tile with rows of whole
    registers. Then the tile takes the place of the vector: no row has to be moved.
    """
    operands, shape = list(op.positions), op.access.shape
    for n, value in enumerate(operands):
        reshape = rewriter.definition(value)
        if value.tile.shape == shape and isinstance(reshape, Reshape):
            (tile,) = reshape.operands
            if len(tile.tile.shape) > 1 and tile.tile.shape[-1] >= LANES:
                operands[n], shape = tile, tile.tile.shape
    return operands, shape


def _block(make: Make, op: Load) -> Value:
    """The load of all elements along the gathered dims; along other dims it loads what `op` loads."""
    pairs = zip(op.access.dims, op.extents, strict=True)
    whole = [Dim("block", Position(), n, in_bounds=True) if d.kind == "gather" else d for d, n in pairs]
    access, positions = with_dims(op, whole)
    fill = () if op.fill is None else (op.fill,)
    return make.add(Load, op.ref, *positions, *fill, access=access, filled=op.filled)
