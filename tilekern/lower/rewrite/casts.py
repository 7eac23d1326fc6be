"""Casts with the meaning of the language, by casts that a target has.

Casts from floats to integers round toward zero and saturate; NaN becomes 0. Casts to floats round once, to nearest
even; numbers beyond the largest one become infinity, or NaN in a format without infinity (E4M3).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.types import BOOL, DTYPES, F32, F64, I32, DType, TileType, is_float8, kind_of
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.lower.rewrite.narrow_floats import encoded, rounded
from tilekern.lower.rewrite.rounding import to_float32

U8, U32 = np.dtype(np.uint8), np.dtype(np.uint32)


def cast(make: Make, x: Value, dtype: DType, has: Capabilities) -> Value:
    """Numbers as another dtype, by casts that the target has."""
    source = x.tile.dtype
    if source == dtype:
        return x
    if has.casts(source, dtype):
        return make.convert(x, dtype)
    if source == BOOL:
        number = cast(make, x, F32, has) if kind_of(dtype) == "float" and dtype != F32 else _from_bool(make, x, has)
        return cast(make, number, dtype, has)
    if dtype == BOOL:
        return make.of("ne", cast(make, x, has.computed_in("ne", source), has), 0)
    if kind_of(dtype) == "float":
        return _to_float(make, x, dtype, has)
    if kind_of(source) == "float":
        wide = x if source == F64 else cast(make, x, F32, has)
        return make.convert(wide, dtype) if has.casts(wide.tile.dtype, dtype) else _to_integer(make, wide, dtype, has)
    return _between_integers(make, x, dtype)


def _from_bool(make: Make, x: Value, has: Capabilities) -> Value:
    if has.casts(BOOL, I32):
        return make.convert(x, I32)
    return make.select(x, make.number(1, TileType(x.tile.shape, I32)), 0)


def _between_integers(make: Make, x: Value, dtype: DType) -> Value:
    """A cast through int32, for a target that casts narrow integers only from and to int32."""
    number = make.bitcast(make.convert(x, I32) if x.tile.dtype.itemsize < 4 else x, I32)
    return make.bitcast(number, dtype) if dtype.itemsize == 4 else make.convert(number, dtype)


# --- to floats -----------------------------------------------------------------------------------------------------


def _to_float(make: Make, x: Value, dtype: DType, has: Capabilities) -> Value:
    source = x.tile.dtype
    if is_float8(source):
        return cast(make, make.convert(x, F32), dtype, has)
    if dtype == F32:
        return _uint32_to_float32(make, x)
    if dtype == F64:
        return make.convert(cast(make, x, F32, has), F64)
    single = to_float32(make, x, lambda y: cast(make, y, F32, has))
    if not is_float8(dtype):
        return make.convert(single, dtype)
    if has.float8_casts:
        return _saturated_to_float8(make, single, dtype)
    return make.bitcast(make.convert(encoded(make, rounded(make, single, dtype), dtype), U8), dtype)


def _uint32_to_float32(make: Make, x: Value) -> Value:
    """Uint32 as float32, from two halves of 16 bits; only their sum is rounded."""
    assert x.tile.dtype == U32, f"no cast from {x.tile.dtype} to float32"
    high = make.bitcast(make.of("shift_right_logical", x, 16), I32)
    low = make.bitcast(make.of("and", x, 0xFFFF), I32)
    return make.of("add", make.of("mul", make.convert(high, F32), 65536.0), make.convert(low, F32))


def _saturated_to_float8(make: Make, x: Value, dtype: DType) -> Value:
    """Float32 to an 8-bit float by a cast that saturates; larger numbers get the bits of infinity or NaN after it.

    The largest magnitude that rounds to the largest number lies half a step above it, and is a tie if that number's
    last bit is 0: E4M3's 448 = 0b1110 * 2^5 is even, so 464 becomes 448; E5M2's 57344 = 0b111 * 2^13 is odd, so 61440
    becomes infinite.
    """
    e4m3 = dtype == DTYPES["f8e4m3fn"]
    size = make.of("abs", x)
    beyond = make.of("gt", size, 464.0) if e4m3 else make.of("ge", size, 61440.0)
    bits = make.bits(make.convert(make.select(beyond, 0.0, x), dtype))
    sign = make.convert(make.of("shift_right_logical", make.bits(x), 24), U8)
    special = make.of("or", make.of("and", sign, 0x80), 0x7F if e4m3 else 0x7C)
    return make.bitcast(make.select(beyond, special, bits), dtype)


# --- to integers ---------------------------------------------------------------------------------------------------


def _to_integer(make: Make, x: Value, dtype: DType, has: Capabilities) -> Value:
    """Float32 or float64 to integers, by a cast of numbers in range; other numbers are replaced before it."""
    limits = ml_dtypes.iinfo(dtype)
    below, above = make.of("lt", x, float(limits.min)), make.of("ge", x, float(limits.max))
    outside = make.of("or", make.of("or", below, above), make.of("ne", x, x))
    inside = make.select(outside, 0.0, x)
    if dtype == U32 and not has.casts(U32, F32):
        whole = _float32_to_uint32(make, inside)
    else:
        whole = make.convert(inside, dtype if dtype.itemsize >= has.integer_bytes else I32)
    return make.convert(make.select(below, limits.min, make.select(above, limits.max, whole)), dtype)


def _float32_to_uint32(make: Make, x: Value) -> Value:
    """Float32 in range to uint32 by a cast to int32: 2^31 is subtracted before and added after, where needed."""
    high = make.of("ge", x, 2.0**31)
    small = make.select(high, make.of("sub", x, 2.0**31), x)
    whole = make.bitcast(make.convert(small, I32), U32)
    return make.select(high, make.of("xor", whole, 1 << 31), whole)
