"""The order of numbers as the order of integers.

The order of floats is that of their bits, but for the sign: of negative numbers all other bits are flipped. -0 becomes
0 before, and any NaN the greatest key.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.types import BOOL, F32, I32, kind_of
from tilekern.lower.rewrite.make import Make


def sort_key(make: Make, x: Value) -> Value:
    """An integer of at least 32 bits, in the order of the elements."""
    dtype = x.tile.dtype
    if kind_of(dtype) != "float":
        narrow = dtype.itemsize < 4
        wide = I32 if dtype == BOOL or kind_of(dtype) == "signed" else np.dtype(np.uint32)
        return make.convert(x, wide) if narrow else x
    wide = make.convert(x, F32) if dtype.itemsize < 4 else x
    zeroed = make.select(make.of("eq", wide, 0.0), 0.0, wide)
    bits = make.bits(zeroed, signed=True)
    width = 8 * bits.tile.dtype.itemsize
    top = int(ml_dtypes.iinfo(bits.tile.dtype).max)
    flipped = make.of("xor", bits, make.of("and", make.of("shift_right_arithmetic", bits, width - 1), top))
    return make.select(make.of("ne", wide, wide), top, flipped)
