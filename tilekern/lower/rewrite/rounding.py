"""Numbers on their way to a narrow float, through float32, rounded once.

A number between two floats of the narrow dtype rounds by which of them is nearer. Rounded to float32 first it may come
to lie in the middle, and then falls on the wrong side. So it is rounded *to odd* first: where it is not exact, to the
neighbour whose last bit is 1, which is never in the middle of two floats of at least two bits less (Boldo and Melquiond
2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", theorem 3).
"""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.types import F32, F64, kind_of
from tilekern.lower.rewrite.make import Make


def to_float32(make: Make, x: Value) -> Value:
    """Numbers as float32, exact or odd; of int64 and uint64 to 53 bits."""
    dtype = x.tile.dtype
    if kind_of(dtype) == "float" and dtype != F64:
        return make.convert(x, F32)
    if kind_of(dtype) != "float" and dtype.itemsize < 4:
        return make.convert(x, F32)
    if dtype.itemsize == 4:
        return make.convert(to_odd(make, x), F32)
    return _float64_to_float32(make, make.convert(x, F64))


def to_odd(make: Make, x: Value) -> Value:
    """Integers of 32 bits that float32 has, and that round on to narrower floats as `x` does.

    Of a number beyond 2^24, the last 9 bits count only as to whether they are all 0.
    """
    last = make.of("and", x, 0x1FF)
    cut = make.of("sub", x, last)
    odd = make.of("add", cut, make.select(make.of("ne", last, 0), make.number(0x100, x.tile), 0))
    small = make.of("lt", x, 1 << 24)
    if kind_of(x.tile.dtype) == "signed":
        small = make.of("and", small, make.of("gt", x, -(1 << 24)))
    return make.select(small, x, odd)


def _float64_to_float32(make: Make, x: Value) -> Value:
    """The nearest float32, or where that is inexact and even, its neighbour on the other side of the number."""
    single = make.convert(x, F32)
    bits = make.bits(single, signed=True)
    back = make.convert(single, F64)
    below = make.of("lt", make.of("abs", back), make.of("abs", x))
    neighbour = make.select(below, make.of("add", bits, 1), make.of("sub", bits, 1))
    even = make.of("eq", make.of("and", bits, 1), 0)
    # Of infinities and NaN there is nothing to round.
    finite = make.of("lt", make.of("abs", x), float("inf"))
    moves = make.of("and", make.of("and", make.of("ne", back, x), even), finite)
    return make.bitcast(make.select(moves, neighbour, bits), F32)
