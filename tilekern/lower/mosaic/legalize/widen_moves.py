"""Select, move and reinterpret narrow elements in 32 bits, where Mosaic does not do so as they are.

Needs: a Func after `legalize_dtypes`. Gives: a Func in which

    selects, sorts, top-k   are of 32 bits; bools are selected by `and` and `or`
    moves                   are of any dtype but bool, if they only cut and join; all others are of 32 bits
    bitcasts                are between numbers of one width, and neither from bfloat16 nor to it
    max, min                of integers that were narrow are written by differences: see `_extreme`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Concatenate, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, F32, I32, DType, is_float8, kind_of
from tilekern.lower.mosaic.legalize.casts import cast, wide
from tilekern.lower.rewrite.narrow_floats import encoded


def widen_moves(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def is_wide(dtype: DType) -> bool:
    """True for dtypes of 32 bits."""
    return dtype.itemsize == 4


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Bitcast():
            replacement = _bitcast(make, op.operands[0], op.dtype)
        case Elementwise(function="max" | "min") if all(_was_narrow(rewriter, x) for x in op.operands):
            replacement = _extreme(make, op.function, *op.operands)
        case Select() if not is_wide(op.result.tile.dtype):
            replacement = _select(make, op)
        case Slice() | Concatenate() | Transpose() | Broadcast() | Reshape() if _moves_narrow(op):
            replacement = None
        case Slice() | Concatenate() | Transpose() | Broadcast() | Reshape() | Pad() | Reverse():
            replacement = _moved(make, op, len(op.operands))
        case DynamicSlice() | Take():
            replacement = _moved(make, op, 1)
        case DynamicUpdateSlice():
            replacement = _moved(make, op, 2)
        case Sort():
            replacement = _sort(make, op)
        case TopK() if not is_wide(op.operands[0].tile.dtype):
            replacement = make.again(op, wide(make, op.operands[0]))
        case _:
            replacement = None
    return None if replacement is None else [replacement]


def _bitcast(make: Make, x: Value, dtype: DType) -> Value | None:
    source = x.tile.dtype
    if source == dtype or (is_wide(source) and is_wide(dtype)):
        return None
    if BF16 in (source, dtype):
        # The bits of a bfloat16 are the upper half of the bits of the same float32.
        if source == BF16:
            high = make.of("shift_right_logical", make.bits(make.convert(x, F32), signed=True), 16)
            return make.convert(high, dtype)
        return make.convert(make.bitcast(make.of("shift_left", make.convert(x, I32), 16), F32), BF16)
    if is_float8(source) and is_float8(dtype):
        return make.bitcast(make.convert(encoded(make, make.convert(x, F32), source), np.dtype(np.uint8)), dtype)
    if is_float8(source):
        return make.convert(encoded(make, make.convert(x, F32), source), dtype)
    if is_float8(dtype):
        return None if source == np.uint8 else make.bitcast(make.convert(make.convert(x, I32), np.dtype("u1")), dtype)
    return make.convert(make.convert(x, I32), dtype)


def _was_narrow(rewriter: Rewriter, x: Value) -> bool:
    """True for integers of at most 16 bits, and for int32 that was cast from such integers."""
    if kind_of(x.tile.dtype) not in ("signed", "unsigned"):
        return False
    if x.tile.dtype.itemsize < 4:
        return True
    if x.tile.dtype != I32:
        return False
    match rewriter.definition(x):
        case Convert(operands=(before,)) | Broadcast(operands=(before,)) | Reshape(operands=(before,)):
            return _was_narrow(rewriter, before)
        case Constant() as op if op.array.size == 1:
            return abs(int(op.array.reshape(-1)[0])) < 1 << 16
        case _:
            return False


def _extreme(make: Make, function: str, x: Value, y: Value) -> Value:
    """max(x, y) = x + max(y - x, 0): MLIR would narrow a maximum of widened integers to one that Mosaic lacks."""
    return make.of("add", x, make.of(function, make.of("sub", y, x), 0))


def _select(make: Make, op: Select) -> Value:
    predicate, on_true, on_false = op.operands
    dtype = op.result.tile.dtype
    if dtype == BOOL:
        on = make.of("and", predicate, on_true)
        return make.of("or", on, make.of("and", make.of("not", predicate), on_false))
    return cast(make, make.select(predicate, wide(make, on_true), wide(make, on_false)), dtype)


def _moves_narrow(op: Op) -> bool:
    """True if Mosaic has the move for its dtype."""
    dtype = op.result.tile.dtype
    if is_wide(dtype):
        return True
    strided = isinstance(op, Slice) and set(op.stride) - {1}
    scalar = op.result.tile.shape == () or any(v.tile.shape == () for v in op.operands)
    return dtype != BOOL and not strided and not scalar


def _moved(make: Make, op: Op, count: int) -> Value | None:
    """The move of the first `count` operands in 32 bits; None if they have 32 bits."""
    dtype = op.result.tile.dtype
    if is_wide(dtype):
        return None
    moved = make.again(op, *(wide(make, x) for x in op.operands[:count]), *op.operands[count:])
    return cast(make, moved, dtype)


def _sort(make: Make, op: Sort) -> Value | None:
    dtype = op.result.tile.dtype
    if all(is_wide(x.tile.dtype) for x in op.operands):
        return None
    return cast(make, make.again(op, *(wide(make, x) for x in op.operands)), dtype)
