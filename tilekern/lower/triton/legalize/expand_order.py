"""Sorts and top-k: find positions by integer keys, then take the elements.

The order of floats is that of their bits, but for the sign: of negative numbers all other bits are flipped. -0 becomes
0 before, and any NaN the greatest key.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Slice
from tilekern.ir.types import BOOL, F32, I32, kind_of
from tilekern.lower.triton.legalize.make import Make


def expand_sort(make: Make, op: Sort) -> Value:
    """A sort → the operand asked for, at positions found by a sort of integer keys."""
    keys = [_key(make, x) for x in op.operands[: op.num_keys]]
    return make.take(op.operands[op.pick], _positions(make, keys, op.dim), op.dim)


def expand_top_k(make: Make, op: TopK) -> Value:
    """The first positions of a sort by the keys upside down."""
    (x,) = op.operands
    places = _positions(make, [make.of("not", _key(make, x))], op.dim)
    zeros, ones = (0,) * len(x.tile.shape), (1,) * len(x.tile.shape)
    return make.add(Slice, places, start=zeros, stop=op.result.tile.shape, stride=ones)


def _positions(make: Make, keys: list[Value], dim: int) -> Value:
    """Where the elements stand in ascending order of the keys, equal ones in their order; int32."""
    lanes = make.lanes(keys[0].tile.shape, dim)
    return make.add(Sort, *keys, lanes, dim=dim, num_keys=len(keys), pick=len(keys))


def _key(make: Make, x: Value) -> Value:
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
