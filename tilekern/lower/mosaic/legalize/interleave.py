"""Interleave and deinterleave lines, a b a b ..., by gathers along the lanes.

Deinterleaved are x[..., p::k], and part p of a reshape to [..., n, k]. Interleaved are k parts [..., n, 1], joined and
reshaped to [..., n k], and pads between the elements of a line. Without gathers these would need a tile of k lanes, of
which a register holds k of 128, and a transposition of each row.

Needs: a Func after `widen_moves`. Gives: a Func whose strides, and pads between elements, are not along the last dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilekern.ir.core import Op, Value, round_up
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Concatenate, Pad, Reshape, Slice
from tilekern.lower.mosaic.legalize.casts import cast, wide
from tilekern.lower.mosaic.legalize.movement import LANES, filled, gathered, lanes


def interleave(op: Op, rewriter: Rewriter) -> Value | None:
    """The result of an op that interleaves or deinterleaves lines; None for any other op."""
    make = Make(rewriter, op)
    match op:
        case Slice(operands=(x,)) if op.stride[-1:] > (1,) and op.result.tile.shape[-1] > 1:
            count = op.result.tile.shape[-1]
            part = _apart(make, x, op.start[-1], op.stride[-1], count)
            return _with_last(rewriter, op, part, start=0, stop=count, stride=1)
        case Slice(operands=(x,)) if _takes_one(op) and (line := _line(rewriter, x)):
            count = prod(x.tile.shape[:-1]) // prod(line.tile.shape[:-1])
            part = make.reshape(_apart(make, line, op.start[-1], x.tile.shape[-1], count), (*x.tile.shape[:-1], 1))
            return _with_last(rewriter, op, part, start=0, stop=1)
        case Pad(operands=(x, fill)) if op.interior[-1:] > (0,) and x.tile.shape[-1] > 1:
            shape, between = x.tile.shape, op.interior[-1]
            gaps = [filled(make, fill, shape, len(shape) - 1, shape[-1])] * between
            line = _together(make, [x, *gaps])
            line = make.part(line, len(shape) - 1, 0, line.tile.shape[-1] - between)
            return _with_last(rewriter, op, line, interior=0)
        case Reshape(operands=(x,)) if parts := _parts(rewriter, x, op.shape):
            shape = (*op.shape[:-1], op.shape[-1] // len(parts))
            return _together(make, [make.reshape(part, shape) for part in parts])
        case _:
            return None


def _with_last(rewriter: Rewriter, op: Slice | Pad, x: Value, **last: int) -> Value:
    """The same op on `x`, with other attributes along the last dim."""
    attributes = {name: (*getattr(op, name)[:-1], n) for name, n in last.items()}
    (result,) = rewriter.visit(replace(op, operands=(x, *op.operands[1:]), **attributes))
    return result


def _takes_one(op: Slice) -> bool:
    return op.result.tile.shape[-1:] == (1,) and op.operands[0].tile.shape[-1] > 1


def _line(rewriter: Rewriter, x: Value) -> Value | None:
    """The operand of the reshape to `x`, if the reshape split its last dim."""
    definition = rewriter.definition(x)
    if not isinstance(definition, Reshape):
        return None
    last, groups = definition.operands[0].tile.shape[-1:], x.tile.shape[-1]
    return definition.operands[0] if last > (groups,) and last[0] % groups == 0 else None


def _parts(rewriter: Rewriter, x: Value, shape: tuple[int, ...]) -> Sequence[Value]:
    """The tiles of one lane whose concatenation is `x`, if `shape` has whole concatenations side by side; else none."""
    joined = rewriter.definition(x)
    if not isinstance(joined, Concatenate) or joined.dim != len(x.tile.shape) - 1:
        return ()
    parts = joined.operands
    whole = shape[-1:] > (len(parts),) and shape[-1] % len(parts) == 0
    return parts if whole and all(part.tile.shape[-1] == 1 for part in parts) else ()


def _apart(make: Make, x: Value, first: int, step: int, count: int) -> Value:
    """The elements first, first + step, ... of each line, gathered from the registers that hold them."""
    *front, size = x.tile.shape
    rows = prod(front)
    lines = make.reshape(wide(make, x), (rows, size))
    gathered_parts: list[Value] = []
    for n in range(0, count, LANES):
        some = min(LANES, count - n)
        start, stop = first + n * step, first + (n + some - 1) * step + 1
        base = start // LANES * LANES
        within = make.part(lines, 1, base, min(size, round_up(stop, LANES)))
        index = make.of("add", make.of("mul", lanes(make, (rows, some), 1), step), start - base)
        gathered_parts.append(gathered(make, within, index))
    return cast(make, make.reshape(make.joined(1, *gathered_parts), (*front, count)), x.tile.dtype)


def _together(make: Make, parts: Sequence[Value]) -> Value:
    """The elements of equal parts in turns, as many at once as one register holds."""
    *front, size = parts[0].tile.shape
    rows, turns, dtype = prod(front), len(parts), parts[0].tile.dtype
    lines = [make.reshape(wide(make, part), (rows, size)) for part in parts]
    at_once = max(1, LANES // turns)
    gathered_parts: list[Value] = []
    for n in range(0, size, at_once):
        some = min(at_once, size - n)
        side_by_side = make.joined(1, *(make.part(line, 1, n, n + some) for line in lines))
        lane = lanes(make, (rows, some * turns), 1)
        index = make.of("add", make.of("mul", make.of("rem", lane, turns), some), make.of("div", lane, turns))
        gathered_parts.append(gathered(make, side_by_side, index))
    return cast(make, make.reshape(make.joined(1, *gathered_parts), (*front, size * turns)), dtype)
