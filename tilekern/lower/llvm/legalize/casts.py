"""Casts by the language's rules, out of those of the emitter, which casts bfloat16 and float16 from and to float32."""

from __future__ import annotations

import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.types import BF16, F16, F32, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.narrow_floats import decoded, encoded, rounded
from tilekern.lower.rewrite.rounding import to_float32

U8 = np.dtype(np.uint8)


def is_narrow(dtype: DType) -> bool:
    """Whether a float has fewer bits than float32."""
    return kind_of(dtype) == "float" and dtype.itemsize < 4


def cast(make: Make, x: Value, dtype: DType) -> Value:
    """A cast in legal form."""
    if x.tile.dtype == dtype:
        return x
    return converted(make, x, dtype) or make.convert(x, dtype)


def converted(make: Make, x: Value, dtype: DType) -> Value | None:
    """What stands for a cast, None if it is legal."""
    source = x.tile.dtype
    if source == dtype:
        return x
    if is_float8(source):
        return cast(make, decoded(make, make.convert(make.bitcast(x, U8), I32), source), dtype)
    if is_float8(dtype):
        single = rounded(make, to_float32(make, x), dtype)
        return make.bitcast(make.convert(encoded(make, single, dtype), U8), dtype)
    if dtype in (BF16, F16) and source != F32:
        return make.convert(to_float32(make, x), dtype)
    if source in (BF16, F16) and dtype != F32:
        return cast(make, make.convert(x, F32), dtype)
    return None
