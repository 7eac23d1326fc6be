"""Compute the sine and the cosine of a float32 tile at once, in a fraction of the time of Mosaic's own.

Mosaic reduces every angle by the costly method of the largest ones, for the sine and again for the cosine. Here a tile
whose angles are all below `LIMIT` is reduced by a short one, r = x - k π/2. Other tiles take Mosaic's functions.

Needs: a Func after `legalize_dtypes`. Gives: a Func with sines and cosines of tiles only in last regions of switches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tilekern.ir.compute import Reduce
from tilekern.ir.control import Switch
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter, ScopedRewriter
from tilekern.ir.types import F32, I32, TileType
from tilekern.lower.mosaic.legalize.functions import polynomial

LIMIT = 2e5
"""Below it k has 17 bits, and its product with 7 bits of π/2 is exact."""

_DIGITS = Fraction(0x3243F6A8885A308D313198A2E03707344A4093822299F31D008, 1 << 201)  # π/2
_COUNT, _BITS = 7, 7
_ALONE = 4  # the parts that are subtracted one by one, so that a result near 0 has all its digits


def _parts() -> tuple[float, ...]:
    """π/2 as a sum of numbers of 7 bits each, and a remainder."""
    parts: list[float] = []
    remainder = _DIGITS
    for n in range(_COUNT):
        unit = Fraction(1, 1 << (_BITS * (n + 1) - 1))
        part = remainder // unit * unit if n < _COUNT - 1 else remainder
        parts.append(float(part))
        remainder -= part
    return tuple(parts)


_PARTS = _parts()


def expand_sines(func: Func) -> Func:
    """Apply the rewrites above."""
    return _Sines().run(func)


class _Sines(ScopedRewriter[Value]):
    """Computes each angle once: `known` has the sines and cosines that are visible at the current place."""

    def __init__(self) -> None:
        super().__init__(self._sine_or_cosine)

    def _sine_or_cosine(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Elementwise) or op.function not in ("sin", "cos"):
            return None
        (x,) = op.operands
        if x.tile.dtype != F32 or not x.tile.shape or not x.tile.size:
            return None
        if x not in self.known:
            self.known[x] = self._both(x, Make(rewriter, op), op)
        return [self.known[x][op.function == "cos"]]

    def _both(self, x: Value, make: Make, op: Op) -> Sequence[Value]:
        most = make.add(Reduce, make.of("abs", x), monoid="max", dims=tuple(range(len(x.tile.shape))))
        # A NaN fails the comparison, and takes Mosaic's functions.
        far = make.select(make.of("lt", most, LIMIT), make.number(0, TileType((), I32)), 1)
        near = self.block((), lambda: _near(make, x))
        any_ = self.block((), lambda: (make.of("sin", x), make.of("cos", x)))
        return self.add(Switch(operands=(far,), regions=(near, any_), loc=op.loc))


def _near(make: Make, x: Value) -> tuple[Value, Value]:
    """The sine and cosine of finite angles below the limit, to 1.7 units of the last place."""
    k = make.of("floor", make.of("add", make.of("mul", x, 2 / math.pi), 0.5))
    r, d = _reduced(make, x, k)
    square = make.of("mul", r, r)
    sine, cosine = _sine(make, r, d, square), _cosine(make, r, d, square)
    quadrant = make.convert(k, I32)
    odd = make.of("ne", make.of("and", quadrant, 1), 0)
    signed_sine = _signed(make, make.select(odd, cosine, sine), quadrant)
    return (
        make.select(make.of("eq", x, 0.0), x, signed_sine),  # the sign of a zero
        _signed(make, make.select(odd, sine, cosine), make.of("add", quadrant, 1)),
    )


def _signed(make: Make, x: Value, quadrant: Value) -> Value:
    """`x`, negated in the third and fourth quadrants, whose numbers have the bit 2."""
    sign = make.of("shift_left", make.of("and", quadrant, 2), 30)
    return make.bitcast(make.of("xor", make.bits(x, signed=True), sign), F32)


def _reduced(make: Make, x: Value, k: Value) -> tuple[Value, Value]:
    """x - k π/2 as a sum r + d; d is the rounding error of r."""
    exact = x
    for part in _PARTS[:_ALONE]:
        exact = make.of("sub", exact, make.of("mul", k, part))
    next_, small, smallest = (make.of("mul", k, part) for part in _PARTS[_ALONE:])
    small_parts = make.of("add", smallest, small)
    high, high_error = _difference(make, exact, next_)
    low = make.of("sub", high_error, small_parts)
    r = make.of("add", high, low)
    d = make.of("add", make.of("sub", high, r), low)
    return r, d


def _difference(make: Make, x: Value, y: Value) -> tuple[Value, Value]:
    """x - y rounded, and the rounding error."""
    difference = make.of("sub", x, y)
    return difference, make.of("sub", make.of("sub", x, difference), y)


def _sine(make: Make, r: Value, d: Value, square: Value) -> Value:
    """The sine of r + d, |r| <= π/4, with the coefficients of Cephes (S. Moshier, single/sinf.c)."""
    series = polynomial(make, square, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    return make.of("add", r, make.of("add", make.of("mul", series, make.of("mul", square, r)), d))


def _cosine(make: Make, r: Value, d: Value, square: Value) -> Value:
    series = polynomial(make, square, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
    fourth = make.of("mul", series, make.of("mul", square, square))
    less = make.of("add", make.of("sub", make.of("mul", square, 0.5), fourth), make.of("mul", d, r))
    return make.of("sub", 1.0, less)
