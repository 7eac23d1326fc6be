"""Casts by the language's rules, out of those that Mosaic has.

Mosaic's own, on all chips: between float32 and bfloat16, from 8-bit floats to float32, from integers narrower than 32
bits to int32 and back, from int32 to float32, and, of numbers that it can hold, from float32 to int32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.types import BF16, BOOL, F32, I32, DType, TileType, is_float8, kind_of
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.narrow_floats import encoded, rounded
from tilekern.lower.rewrite.rounding import to_odd

U32 = np.dtype(np.uint32)


def is_native(source: DType, target: DType) -> bool:
    """Whether Mosaic has a cast as the language means it."""
    if source == target:
        return True
    if kind_of(source) == "float":
        return target == F32 or (source, target) == (F32, BF16)
    narrow = source != BOOL and source.itemsize < 4
    return (narrow and target in (I32, F32)) or (source == I32 and (target == F32 or _is_narrow_integer(target)))


def _is_narrow_integer(dtype: DType) -> bool:
    return kind_of(dtype) in ("signed", "unsigned") and dtype.itemsize < 4


def wide(make: Make, x: Value) -> Value:
    """The same numbers in a dtype of 32 bits."""
    dtype = x.tile.dtype
    if dtype == BOOL:
        return make.select(x, make.number(1, TileType(x.tile.shape, I32)), 0)
    if dtype.itemsize == 4:
        return x
    return make.convert(x, F32 if kind_of(dtype) == "float" else I32)


def cast(make: Make, x: Value, dtype: DType) -> Value:
    """A cast to any dtype; of a dtype of 32 bits to a narrower one, too, from which `wide` came."""
    source = x.tile.dtype
    if is_native(source, dtype):
        return make.convert(x, dtype)
    if dtype == BOOL:
        return make.of("ne", wide(make, x), 0)
    if kind_of(source) == "float":
        x = wide(make, x)
        return _to_float(make, x, dtype) if kind_of(dtype) == "float" else _to_integer(make, x, dtype)
    if kind_of(dtype) == "float":
        return _from_integer(make, wide(make, x), dtype, exact=source.itemsize < 4)
    number = wide(make, x)
    if dtype.itemsize == 4:
        return make.bitcast(number, dtype)
    return make.convert(make.bitcast(number, I32), dtype)


def _to_float(make: Make, x: Value, dtype: DType) -> Value:
    """From float32."""
    if not is_float8(dtype):
        return make.convert(x, dtype)
    bits = encoded(make, rounded(make, x, dtype), dtype)
    return make.bitcast(make.convert(bits, np.dtype(np.uint8)), dtype)


def _from_integer(make: Make, x: Value, dtype: DType, exact: bool) -> Value:
    """From 32 bits; `exact` if float32 has all of them."""
    if exact or dtype == F32:
        return _to_float(make, _float32(make, x), dtype)
    return _to_float(make, _float32(make, to_odd(make, x)), dtype)


def _float32(make: Make, x: Value) -> Value:
    """int32 and uint32, the latter from its halves: their sum is the only rounding."""
    if x.tile.dtype == I32:
        return make.convert(x, F32)
    high = make.bitcast(make.of("shift_right_logical", x, 16), I32)
    low = make.bitcast(make.of("and", x, 0xFFFF), I32)
    return make.of("add", make.of("mul", make.convert(high, F32), 65536.0), make.convert(low, F32))


def _to_integer(make: Make, x: Value, dtype: DType) -> Value:
    """From float32 toward zero and saturating, NaN to 0: what is outside is replaced before the cast."""
    limits = ml_dtypes.iinfo(dtype)
    below, above = make.of("lt", x, float(limits.min)), make.of("ge", x, float(limits.max))
    outside = make.of("or", make.of("or", below, above), make.of("ne", x, x))
    inside = make.select(outside, 0.0, x)
    if dtype == U32:
        # 2^31 and more: the number less 2^31, then its highest bit.
        high = make.of("ge", inside, 2.0**31)
        small = make.select(high, make.of("sub", inside, 2.0**31), inside)
        whole = make.bitcast(make.convert(small, I32), U32)
        found = make.select(high, make.of("xor", whole, 1 << 31), whole)
        return make.select(below, 0, make.select(above, limits.max, found))
    found = make.select(below, limits.min, make.select(above, limits.max, make.convert(inside, I32)))
    return make.convert(found, dtype)
