"""Sorts and top-k by signed keys of 16, 32 or 64 bits.

    sort x            → sort key(x), of integers, converted back to x: equal elements have equal bits
    sort x by keys    → take x at the positions that a sort of (keys, positions) finds
    top_k x           → top_k key(x)

Keys of elements of at most 16 bits have 16 bits; a sort packs such a key and its position into one word.
"""

from __future__ import annotations

import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BOOL, DType, kind_of
from tilekern.lower.rewrite.expand_order import expand_sort
from tilekern.lower.rewrite.sort_key import sort_key

_I16 = np.dtype(np.int16)


def sort(make: Make, op: Sort, rewriter: Rewriter) -> Value:
    """The picked operand, sorted; lines of one element stay as they are."""
    x, dtype = op.operands[op.pick], op.result.tile.dtype
    if op.result.tile.shape[op.dim] < 2:
        return x
    if (op.num_keys, op.pick) == (1, 0) and kind_of(dtype) != "float":
        return _element(make, make.add(Sort, _key(make, x), dim=op.dim), dtype)
    return expand_sort(make, op, rewriter, _key)


def top_k(make: Make, op: TopK) -> Value:
    """The positions of the greatest elements; in lines of one element they are 0."""
    (x,) = op.operands
    if x.tile.shape[op.dim] < 2:
        return make.number(0, op.result.tile)
    return make.again(op, _key(make, x))


def _key(make: Make, x: Value) -> Value:
    dtype = x.tile.dtype
    if kind_of(dtype) == "unsigned":
        width = 8 * dtype.itemsize
        x = make.bitcast(make.of("xor", x, 1 << (width - 1)), np.dtype(f"i{dtype.itemsize}"))
    key = sort_key(make, x)
    return make.convert(key, _I16) if dtype.itemsize <= 2 else key


def _element(make: Make, key: Value, dtype: DType) -> Value:
    """The integer or bool of a key."""
    if dtype == BOOL:
        return make.of("ne", key, 0)
    number = make.convert(key, np.dtype(f"i{dtype.itemsize}"))
    if kind_of(dtype) == "signed":
        return number
    return make.of("xor", make.bitcast(number, dtype), 1 << (8 * dtype.itemsize - 1))
