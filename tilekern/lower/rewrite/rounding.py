"""Casts to narrow floats through float32 with one rounding in effect: the first rounding is *to odd*.

A number rounds to the nearer of two neighbours of the narrow dtype. Rounded to the nearest float32 first, it may become
the midpoint of the two, and then the second rounding may go to the wrong side. Rounding to odd takes, for a number that
is not exact, the neighbour whose last bit is 1. This is never the midpoint of two floats of at least two bits less
(Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
theorem 3).
"""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.types import F32, F64, kind_of


def to_float32(make: Make, x: Value, cast: Callable[[Value], Value] | None = None) -> Value:
    """Numbers as float32, exact or rounded to odd; 64-bit integers are rounded to 53 bits before.

    Args:
      make: adds ops.
      x: the numbers.
      cast: how numbers that float32 has become float32; by default an op `Convert`.
    """
    cast = cast or (lambda y: make.convert(y, F32))
    dtype = x.tile.dtype
    if dtype.itemsize == 8:
        return _float64_to_float32(make, make.convert(x, F64))
    if kind_of(dtype) == "float" or dtype.itemsize < 4:
        return cast(x)
    return cast(to_odd(make, x))


def to_odd(make: Make, x: Value) -> Value:
    """32-bit integers rounded to odd: float32 has them, and they round to narrower floats as `x` does.

    The last 9 bits of a number beyond 2^24 become 0 if they are all 0, else 2^8.
    """
    last = make.of("and", x, 0x1FF)
    cut = make.of("sub", x, last)
    odd = make.of("add", cut, make.select(make.of("ne", last, 0), make.number(0x100, x.tile), 0))
    small = make.of("lt", x, 1 << 24)
    if kind_of(x.tile.dtype) == "signed":
        small = make.of("and", small, make.of("gt", x, -(1 << 24)))
    return make.select(small, x, odd)


def _float64_to_float32(make: Make, x: Value) -> Value:
    """Float64 rounded to odd: the nearest float32; if that is inexact and even, the neighbour beyond the number."""
    single = make.convert(x, F32)
    bits = make.bits(single, signed=True)
    back = make.convert(single, F64)
    below = make.of("lt", make.of("abs", back), make.of("abs", x))
    neighbour = make.select(below, make.of("add", bits, 1), make.of("sub", bits, 1))
    even = make.of("eq", make.of("and", bits, 1), 0)
    # Infinities and NaN are not rounded.
    finite = make.of("lt", make.of("abs", x), float("inf"))
    moves = make.of("and", make.of("and", make.of("ne", back, x), even), finite)
    return make.bitcast(make.select(moves, neighbour, bits), F32)
