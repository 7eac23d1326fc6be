"""The dtypes that Mosaic computes in and casts, on all chips.

It casts between float32 and bfloat16, from 8-bit floats to float32, from integers narrower than 32 bits to int32 and
float32, and from int32 to these and to float32; from float32 to int32 those numbers that int32 has.
"""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.types import BF16, BOOL, F32, I32, DType, TileType, kind_of
from tilekern.lower.rewrite import casts
from tilekern.lower.rewrite.capabilities import Capabilities


def has_cast(source: DType, target: DType) -> bool:
    """True if Mosaic has a cast with the meaning of the language."""
    if source == target:
        return True
    if kind_of(source) == "float":
        return target == F32 or (source, target) == (F32, BF16)
    narrow = source != BOOL and source.itemsize < 4
    return (narrow and target in (I32, F32)) or (source == I32 and (target == F32 or _is_narrow_integer(target)))


def _is_narrow_integer(dtype: DType) -> bool:
    return kind_of(dtype) in ("signed", "unsigned") and dtype.itemsize < 4


MOSAIC = Capabilities(
    casts=has_cast,
    integer_bytes=4,
    functions={BF16: frozenset(("add", "sub", "mul", "neg", "max", "min"))},
    ordered_bools=True,
    reduces_dims=True,
)
"""The same on all chips: those without vector arithmetic of bfloat16 convert it themselves."""


def wide(make: Make, x: Value) -> Value:
    """x as float32 for floats, else as int32: uint8[4] becomes int32[4]. x itself if its dtype has 32 bits."""
    dtype = x.tile.dtype
    if dtype == BOOL:
        return make.select(x, make.number(1, TileType(x.tile.shape, I32)), 0)
    if dtype.itemsize == 4:
        return x
    return make.convert(x, F32 if kind_of(dtype) == "float" else I32)


def cast(make: Make, x: Value, dtype: DType) -> Value:
    """Numbers as another dtype, by casts that Mosaic has."""
    return casts.cast(make, x, dtype, MOSAIC)
