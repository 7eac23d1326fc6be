"""Floats narrower than float32 that a target lacks: rounded in float32, encoded to their bits, decoded from them.

Every number of a narrow format is a float32 number. To round to nearest even on the bits, add half of the dropped part,
less one if the last kept bit is 0, then drop it. Below the smallest normal number all numbers are multiples of one
quantum q: (|x| + 2^23 q) - 2^23 q rounds to these, since float32 numbers from 2^23 q to 2^24 q have a distance of q.
"""

from __future__ import annotations

import numpy as np

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.records import record
from tilekern.ir.types import DTYPES, F16, F32, I32, DType

_SIGN, _EXPONENT = -(1 << 31), 0x7F800000


@record
class Format:
    """The layout of a narrow float.

    Attributes:
      width: the number of bits.
      fraction: the number of bits of the fraction.
      bias: the bias of the exponent.
      largest: the largest magnitude that does not round beyond the largest number.
      infinity: the bits of infinity; the bits of NaN in a format without infinity.
      nan: the bits of NaN.
    """

    width: int
    fraction: int
    bias: int
    largest: float
    infinity: int
    nan: int

    @property
    def dropped(self) -> int:
        """The bits of a float32 fraction beyond its own."""
        return 23 - self.fraction

    @property
    def normal(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def quantum(self) -> float:
        """The smallest number above 0."""
        return self.normal * 2.0**-self.fraction


def _below(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(0)))


# Half a step above the largest number is a tie; it rounds to the even neighbour: 448 of E4M3 is even, 57344 of E5M2 and
# 65504 of float16 are odd.
FORMATS: dict[DType, Format] = {
    F16: Format(16, 10, 15, _below(65520.0), 0x7C00, 0x7E00),
    DTYPES["f8e5m2"]: Format(8, 2, 15, _below(61440.0), 0x7C, 0x7E),
    DTYPES["f8e4m3fn"]: Format(8, 3, 7, 464.0, 0x7F, 0x7F),
}


def rounded(make: Make, x: Value, dtype: DType) -> Value:
    """Float32 numbers rounded to numbers of a narrow dtype, as float32."""
    form = FORMATS[dtype]
    bits = make.bits(x, signed=True)
    size = make.of("abs", x)
    even = make.of("and", make.of("shift_right_logical", bits, form.dropped), 1)
    half = make.of("add", even, (1 << (form.dropped - 1)) - 1)
    normal = make.of("and", make.of("add", bits, half), -(1 << form.dropped))
    magic = form.quantum * 2.0**23
    tiny = make.of("sub", make.of("add", size, magic), magic)
    sign = make.of("and", bits, _SIGN)
    small = make.of("or", make.bits(tiny, signed=True), sign)
    beyond = make.of("or", sign, _EXPONENT if form.infinity != form.nan else 0x7FC00000)
    result = make.select(make.of("lt", size, form.normal), small, normal)
    result = make.select(make.of("gt", size, form.largest), beyond, result)
    return make.select(make.of("ne", x, x), x, make.bitcast(result, F32))


def encoded(make: Make, x: Value, dtype: DType) -> Value:
    """The bits, as int32, of float32 numbers that a narrow dtype has."""
    form = FORMATS[dtype]
    bits = make.bits(x, signed=True)
    size = make.of("abs", x)
    cut = make.of("shift_right_logical", make.bits(size, signed=True), form.dropped)
    normal = make.of("sub", cut, (127 - form.bias) << form.fraction)
    is_tiny = make.of("lt", size, form.normal)
    steps = make.of("mul", make.select(is_tiny, size, 0.0), 1 / form.quantum)
    magnitude = make.select(is_tiny, make.convert(steps, I32), normal)
    magnitude = make.select(make.of("eq", size, float("inf")), form.infinity, magnitude)
    magnitude = make.select(make.of("ne", x, x), form.nan, magnitude)
    sign = make.of("shift_left", make.of("shift_right_logical", bits, 31), form.width - 1)
    return make.of("or", magnitude, sign)


def decoded(make: Make, bits: Value, dtype: DType) -> Value:
    """The numbers, as float32, whose bits in a narrow dtype are `bits`, int32."""
    form = FORMATS[dtype]
    size = make.of("and", bits, (1 << (form.width - 1)) - 1)
    sign = make.of("shift_left", make.of("shift_right_logical", bits, form.width - 1), 31)
    normal = make.of("add", make.of("shift_left", size, form.dropped), (127 - form.bias) << 23)
    special = make.of("or", make.of("shift_left", size, form.dropped), _EXPONENT)
    tiny = make.of("mul", make.convert(size, F32), form.quantum)
    magnitude = make.select(make.of("ge", size, form.infinity), special, normal)
    magnitude = make.select(make.of("lt", size, 1 << form.fraction), make.bits(tiny, signed=True), magnitude)
    return make.bitcast(make.of("or", magnitude, make.of("and", sign, _SIGN)), F32)
