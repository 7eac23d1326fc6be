"""Write integer functions, `nextafter` and `is_finite` in terms of plain bit operations and comparisons.

Needs: a verified Func. Gives: a Func with the same outputs, without the functions that a target lacks. Its shifts, if a
target lacks any, are by fewer bits than a number has; right shifts are arithmetic for signed dtypes, else logical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial

import ml_dtypes
import numpy as np

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BOOL, F32, kind_of


def expand_bits(func: Func, lacks: Set[str] | None = None) -> Func:
    """Apply the rewrites.

    Args:
      func: the Func.
      lacks: the functions that the target lacks; by default all functions that have a rewrite.
    """
    return Rewriter(partial(_rule, _EXPANSIONS.keys() if lacks is None else lacks)).run(func)


def _rule(lacks: Set[str], op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, Elementwise) or op.operands[0].tile.dtype == BOOL or op.function not in lacks:
        return None
    replacement = _EXPANSIONS[op.function](Make(rewriter, op), op)
    return None if replacement is None else [replacement]


def _count_of_ones(make: Make, op: Elementwise) -> Value:
    return make.bitcast(_population_count(make, make.bits(op.operands[0])), op.result.tile.dtype)


def _count_of_zeros(make: Make, op: Elementwise) -> Value:
    return make.bitcast(_leading_zeros(make, make.bits(op.operands[0])), op.result.tile.dtype)


def _is_finite(make: Make, op: Elementwise) -> Value:
    (x,) = op.operands
    wide = x if x.tile.dtype.itemsize >= 4 else make.convert(x, F32)  # E4M3 has no infinity
    return make.of("lt", make.of("abs", wide), np.inf)


def _sign(make: Make, op: Elementwise) -> Value | None:
    """The sign of integers; None for floats, whose sign targets have, or write by a formula of their own."""
    (x,) = op.operands
    if kind_of(x.tile.dtype) == "float":
        return None
    positive = make.select(make.of("gt", x, 0), make.number(1, x.tile), 0)
    return positive if kind_of(x.tile.dtype) == "unsigned" else make.select(make.of("lt", x, 0), -1, positive)


def _repeated(byte: int, x: Value) -> int:
    return int.from_bytes(bytes([byte]) * x.tile.dtype.itemsize)


def _population_count(make: Make, x: Value) -> Value:
    """The number of bits that are 1: sums of 2, of 4 and of 8 neighbours in parallel, then the sum of the bytes.

    Warren, Hacker's Delight, 2nd edition, section 5-1.
    """
    half = make.of("and", make.of("shift_right_logical", x, 1), _repeated(0x55, x))
    pairs = make.of("sub", x, half)
    quarter = make.of("and", make.of("shift_right_logical", pairs, 2), _repeated(0x33, x))
    nibbles = make.of("add", make.of("and", pairs, _repeated(0x33, x)), quarter)
    sums = make.of("add", nibbles, make.of("shift_right_logical", nibbles, 4))
    total = make.of("and", sums, _repeated(0x0F, x))
    shift = 8
    while shift < 8 * x.tile.dtype.itemsize:
        total = make.of("add", total, make.of("shift_right_logical", total, shift))
        shift *= 2
    return make.of("and", total, 0x7F)


def _leading_zeros(make: Make, x: Value) -> Value:
    """The leading zeros: copy the highest 1 to all lower places, and count the bits that stay 0."""
    width = 8 * x.tile.dtype.itemsize
    shift = 1
    while shift < width:
        x = make.of("or", x, make.of("shift_right_logical", x, shift))
        shift *= 2
    return make.of("sub", width, _population_count(make, x))


def _shift(make: Make, op: Elementwise) -> Value | None:
    """A shift by the width of the dtype or more shifts all bits out; the hardware's result is unspecified there."""
    x, amount = op.operands
    width = 8 * x.tile.dtype.itemsize
    signed = op.function == "shift_right_arithmetic"
    if kind_of(x.tile.dtype) == ("signed" if signed else "unsigned"):
        return None if _is_small(make, amount, width) else _guarded(make, op.function, x, amount, width)
    # Triton's right shifts are arithmetic for signed dtypes, logical for unsigned dtypes.
    number, count = make.bits(x, signed), make.bits(amount, signed)
    shifted = (
        make.of(op.function, number, count)
        if _is_small(make, amount, width)
        else _guarded(make, op.function, number, count, width)
    )
    return make.bitcast(shifted, x.tile.dtype)


def _is_small(make: Make, amount: Value, width: int) -> bool:
    constant = make.known(amount)
    return constant is not None and 0 <= constant < width


def _guarded(make: Make, function: str, x: Value, amount: Value, width: int) -> Value:
    unsigned = make.bits(amount)
    inside = make.of("lt", unsigned, width)
    small = make.bitcast(make.of("min", unsigned, width - 1), amount.tile.dtype)
    shifted = make.of(function, x, small)
    # An arithmetic shift by the width or more leaves the sign, as the shift by width - 1 does.
    return shifted if function == "shift_right_arithmetic" else make.select(inside, shifted, 0)


def _nextafter(make: Make, op: Elementwise) -> Value:
    """The next float from x in the direction of y: the next bit pattern up or down.

    Floats of one sign have the order of their bits. The next float from 0 is the smallest number with the sign of y.
    """
    x, y = op.operands
    dtype = x.tile.dtype
    bits, toward = make.bits(x, signed=True), make.bits(y, signed=True)
    sign = int(ml_dtypes.iinfo(bits.tile.dtype).min)
    zero = make.of("eq", make.of("and", bits, ~sign), 0)
    a, b = (v if dtype.itemsize >= 4 else make.convert(v, F32) for v in (x, y))
    # Away from zero: y > x > 0 or y < x < 0.
    up, positive = make.of("lt", a, b), make.of("gt", a, 0.0)
    grows = make.of("not", make.of("xor", up, positive))
    step = make.select(grows, make.of("add", bits, 1), make.of("sub", bits, 1))
    smallest = make.of("or", make.of("and", toward, sign), 1)
    result = make.select(zero, smallest, step)
    result = make.select(make.of("eq", a, b), toward, result)
    nan = make.of("or", make.of("ne", a, a), make.of("ne", b, b))
    bits_of_nan = int(np.asarray(np.nan).astype(dtype).view(bits.tile.dtype))
    return make.bitcast(make.select(nan, bits_of_nan, result), dtype)


_EXPANSIONS: dict[str, Callable[[Make, Elementwise], Value | None]] = {
    "population_count": _count_of_ones,
    "clz": _count_of_zeros,
    "shift_left": _shift,
    "shift_right_logical": _shift,
    "shift_right_arithmetic": _shift,
    "nextafter": _nextafter,
    "sign": _sign,
    "is_finite": _is_finite,
}
