"""Casts to narrow floats that change no number: of 8-bit integers, and of unpacked numbers of 4 bits.

The CPU multiplies few rows in float32, and rounds to bfloat16 in several instructions.
"""

from __future__ import annotations

import math

from tilekern.ir.compute import Convert, Select
from tilekern.ir.constants import splat_of
from tilekern.ir.core import Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BF16, F16, DType, kind_of

# Significant bits of a float, the implicit one included.
_BITS = {BF16: 8, F16: 11}
# Numbers of at most 8 bits times a power of two up to this one are neither too large nor too small for float16.
_LARGEST_POWER = 4
_UNKNOWN = 64


def before_exact_cast(x: Value, rewriter: Rewriter, dtype: DType) -> Value:
    """The value y of x = convert(y), to bfloat16 or float16, if the cast changes no number; else, or for `dtype`, x."""
    op = rewriter.definition(x)
    if not isinstance(op, Convert) or op.dtype not in _BITS or op.dtype == dtype:
        return x
    return op.operands[0] if _significant_bits(op.operands[0], rewriter) <= _BITS[op.dtype] else x


def _significant_bits(x: Value, rewriter: Rewriter, scaled: bool = False) -> int:
    """The most significant bits that a number of x may have: 8 for int8 and uint8, `_UNKNOWN` if nothing is proved.

    Significant bits are the binary digits from the first 1 to the last 1. A product with a small power of two has as
    many as the other factor. Only one product counts, so that the power stays small: `scaled` is True for its factor.
    """
    dtype, op = x.tile.dtype, rewriter.definition(x)
    bits = dtype.itemsize * 8 if kind_of(dtype) in ("signed", "unsigned") and dtype.itemsize == 1 else _UNKNOWN
    match op:
        case Convert() if kind_of(dtype) == "float" or kind_of(op.operands[0].tile.dtype) != "float":
            bits = min(bits, _significant_bits(op.operands[0], rewriter, scaled))
        case Select():
            bits = min(bits, max(_significant_bits(v, rewriter, scaled) for v in op.operands[1:]))
        case Elementwise(function="neg") if kind_of(dtype) == "float":
            bits = _significant_bits(op.operands[0], rewriter, scaled)
        case Elementwise(function="and" | "mul") if not (scaled and op.function == "mul"):
            bits = min(bits, *(_times(op, side, rewriter) for side in (0, 1)))
        case _:
            pass
    return bits


def _times(op: Elementwise, side: int, rewriter: Rewriter) -> int:
    """The significant bits of `y & mask` or `y * 2^p`, where operand `side` is the splat, else `_UNKNOWN`."""
    splat = splat_of(op.operands[side], rewriter)
    if splat is None:
        return _UNKNOWN
    if op.function == "and":
        return int(splat).bit_length() if kind_of(op.result.tile.dtype) != "bool" and 0 <= splat < 256 else _UNKNOWN
    mantissa, exponent = math.frexp(float(splat)) if kind_of(op.result.tile.dtype) == "float" else (0.0, 0)
    power = abs(mantissa) == 0.5 and abs(exponent - 1) <= _LARGEST_POWER
    return _significant_bits(op.operands[1 - side], rewriter, scaled=True) if power else _UNKNOWN
