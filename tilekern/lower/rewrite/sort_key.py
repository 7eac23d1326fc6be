"""Integer keys that have the order of numbers.

The bits of a float, as an integer, are in the order of the numbers once all bits but the sign of negative numbers are
flipped. -0, whose key would be -1, gets the key of 0; every NaN gets the greatest key.
"""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.types import F32, I32, kind_of


def sort_key(make: Make, x: Value) -> Value:
    """Keys in the order of the elements: int32, in the range of the dtype, for narrow dtypes; else of the same width.

    Unsigned integers of 32 bits and more stay unsigned; all other keys are signed.
    """
    dtype = x.tile.dtype
    narrow = dtype.itemsize < 4
    if kind_of(dtype) != "float":
        return make.convert(x, I32) if narrow else x
    bits = make.bits(x, signed=True)
    bits = make.convert(bits, I32) if narrow else bits
    top = (1 << 8 * dtype.itemsize - 1) - 1
    sign = make.of("shift_right_arithmetic", bits, 8 * bits.tile.dtype.itemsize - 1)
    flipped = make.of("xor", bits, make.of("and", sign, top))
    key = make.select(make.of("eq", flipped, -1), 0, flipped)
    wide = make.convert(x, F32) if narrow else x
    return make.select(make.of("ne", wide, wide), top, key)
