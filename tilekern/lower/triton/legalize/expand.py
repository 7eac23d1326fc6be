"""Write ops that Triton lacks, or means otherwise, in terms of ops that it has.

Needs: a verified Func. Gives: a Func with the same outputs (to the rounding of transcendental functions), in which

    converts        are from or to float32 or float64 where a float narrower than bfloat16 or an integer meets another
                    float; from floats to integers, of numbers that the integer can hold
    8-bit floats    are only converted, moved and multiplied (`Dot`); nothing chooses between them
    narrow floats   are added, subtracted, multiplied, compared; all other functions are of float32
    bools           are not compared, reduced or scanned: int32 is
    shifts          are by fewer bits than there are
    dots            are of operands that tensor cores or Triton's own loops take; see `expand_dot`
    sorts, top-k    are of signed keys; sorts find positions, or pick their only key; see `expand_order`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np

from tilekern.ir.compute import Convert, Dot, Reduce, Select
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import BF16, BOOL, DTYPES, F16, F32, F64, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.logical import expand_logical
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.rounding import to_float32
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.legalize import expand_order
from tilekern.lower.triton.legalize.expand_dot import expand_dot

# What narrow floats do by themselves; anything else is computed in float32 and rounded once, which gives the same bits
# as computing exactly for these, too: float32 has more than twice their digits.
_NATIVE = ("add", "sub", "mul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge")


def expand(func: Func, chip: Chip) -> Func:
    """Apply the rewrites above."""
    return Rewriter(partial(_rule, chip)).run(func)


def _rule(chip: Chip, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Convert():
            found = _convert(make, op.operands[0], op.dtype)
        case Select() if is_float8(op.result.tile.dtype):
            found = make.select(*op.operands)
        case Iota() if op.dtype != I32:
            found = _narrowed(make, make.lanes(op.shape, op.dim), op.dtype)
        case Elementwise():
            found = _elementwise(make, op)
        case Reduce() | Scan() | ArgReduce():
            found = _widened(make, op)
        case Dot():
            found = expand_dot(make, op, chip)
        case Sort():
            found = expand_order.sort(make, op, rewriter)
        case TopK():
            found = expand_order.top_k(make, op)
        case Atomic(kind="max" | "min") if kind_of(op.ref.ref.dtype) == "float":
            return rewriter.add(_with_sign_of_nan(make, op))
        case _:
            return None
    return None if found is None else [found]


def _with_sign_of_nan(make: Make, op: Atomic) -> Atomic:
    """Float maxima and minima are of the bits: there a NaN wins all maxima if its sign is +, all minima if it is -."""
    value = op.value
    nan = np.copysign(np.asarray(np.nan, value.tile.dtype), 1 if op.kind == "max" else -1)
    marked = make.select(make.of("ne", value, value), make.constant(nan, value.tile), value)
    return op.copy((op.ref, marked, *op.operands[2:]))


# --- converts ------------------------------------------------------------------------------------------------------


def _convert(make: Make, x: Value, dtype: DType) -> Value | None:
    source = x.tile.dtype
    if dtype == BOOL:
        return make.of("ne", make.convert(x, F32) if is_float8(source) else x, 0)
    if source == BOOL:
        return None if dtype in (I32, F32, F64) else _narrowed(make, make.convert(x, I32), dtype)
    floats = kind_of(source) == "float", kind_of(dtype) == "float"
    if floats == (True, False):
        return _to_integer(make, x, dtype)
    if is_float8(dtype):
        return _to_float8(make, x, dtype)
    if not floats[1] or (dtype in (F32, F64) and not (is_float8(source) and dtype == F64)):
        return None
    return None if source == F32 else make.convert(to_float32(make, x), dtype)


def _to_integer(make: Make, x: Value, dtype: DType) -> Value:
    """Toward zero and saturating, NaN to 0: what is outside is replaced before the cast."""
    wide = make.convert(x, F64 if x.tile.dtype == F64 else F32)
    limits = ml_dtypes.iinfo(dtype)
    below, above = make.of("lt", wide, float(limits.min)), make.of("ge", wide, float(limits.max))
    outside = make.of("or", make.of("or", below, above), make.of("ne", wide, wide))
    inside = make.convert(make.select(outside, 0.0, wide), dtype)
    return make.select(below, limits.min, make.select(above, limits.max, inside))


def _to_float8(make: Make, x: Value, dtype: DType) -> Value | None:
    """Triton saturates; by IEEE rules what rounds beyond the largest number is infinite, or NaN in E4M3 (no infinity).

    The largest magnitude that rounds to the largest number lies half a step above it, and is a tie if that number's
    last bit is 0: E4M3's 448 = 0b1110 * 2^5 is even, so 464 becomes 448; E5M2's 57344 = 0b111 * 2^13 is odd, so 61440
    becomes infinite.
    """
    wide = to_float32(make, x)
    e4m3 = dtype == DTYPES["f8e4m3fn"]
    beyond = make.of("gt", make.of("abs", wide), 464.0) if e4m3 else make.of("ge", make.of("abs", wide), 61440.0)
    narrow = make.convert(make.select(beyond, 0.0, wide), dtype)
    bits, unsigned = make.bits(narrow), np.dtype(np.uint8)
    sign = make.convert(make.of("shift_right_logical", make.bits(wide), 24), unsigned)
    special = make.of("or", make.of("and", sign, 0x80), 0x7F if e4m3 else 0x7C)
    return make.bitcast(make.select(beyond, special, bits), dtype)


# --- elementwise ---------------------------------------------------------------------------------------------------


def _elementwise(make: Make, op: Elementwise) -> Value | None:
    dtype, result = op.operands[0].tile.dtype, op.result.tile.dtype
    if dtype == BOOL:
        return expand_logical(make, op, lambda x: make.convert(x, I32))
    found = expand_bits(make, op)
    if found is not None or kind_of(dtype) != "float":
        return found
    if op.function == "is_finite":
        wide = op.operands[0] if dtype in (F32, F64) else make.convert(op.operands[0], F32)
        return make.of("lt", make.of("abs", wide), np.inf)
    narrow = dtype in (BF16, F16) and op.function not in _NATIVE
    if not (is_float8(dtype) or narrow):
        return None
    wide = make.of(op.function, *(make.convert(x, F32) for x in op.operands))
    return wide if result == BOOL else _narrowed(make, wide, result)


# --- along a dim ---------------------------------------------------------------------------------------------------


def _widened(make: Make, op: Reduce | Scan | ArgReduce) -> Value | None:
    """Accumulate in a dtype of at least 32 bits; several dims one after the other."""
    (x,) = op.operands
    dtype = x.tile.dtype
    wide = I32 if dtype == BOOL else _wide(dtype)
    if isinstance(op, Reduce):
        if wide == dtype and len(op.dims) == 1:
            return None
        total = make.convert(x, wide)
        monoid = {"max": "or", "min": "and"}.get(op.monoid, op.monoid) if dtype == BOOL else op.monoid
        for dim in sorted(op.dims, reverse=True):
            total = make.reduce(total, monoid, dim)
        return _narrowed(make, total, dtype)
    if wide == dtype:
        return None
    moved = make.again(op, make.convert(x, wide))
    return moved if isinstance(op, ArgReduce) else _narrowed(make, moved, dtype)


def _narrowed(make: Make, x: Value, dtype: DType) -> Value:
    if x.tile.dtype == dtype:
        return x
    return _convert(make, x, dtype) or make.convert(x, dtype)


def _wide(dtype: DType) -> DType:
    """The dtype of at least 32 bits that has all numbers of a dtype."""
    if dtype.itemsize >= 4:
        return dtype
    return {"float": F32, "signed": I32, "unsigned": np.dtype(np.uint32), "bool": I32}[kind_of(dtype)]
