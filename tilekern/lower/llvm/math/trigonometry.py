"""sin, cos, tan and atan2 of float32; tan and atan2 take operands converted to float64.

sin and cos are ±sin(r) with x = n π + r, for cos with n half of an odd number: then there is one polynomial, for
|r| <= π / 2, and only the sign to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I1, Reg, constant
from tilekern.lower.llvm.math.exponentials import absolute, format_of, polynomial, with_sign

_SIN = (-0.16666659712791443, 0.008333069272339344, -0.00019809769582934678, 2.6060592972498853e-06)
"""(sin(r) / r - 1) / r² by powers of r², |r| <= π / 2: minimax of the relative error of sin (Remez)."""

_PI = (3.141592502593994, 1.5099578831723193e-07, 1.078060505991553e-14)
"""π as three float32; positive, or -0 would become 0."""

_HUGE = 65536.0
"""From here on, three parts of π are too imprecise."""

_INVERSE_PI = 0x517CC1B727220A94FE13ABE8FA9A6EE06DB14ACC9E21C820FF28
"""The first 208 bits of the fraction of 1 / π."""


def sin(code: Code, x: Reg) -> Reg:
    """The sine of x radians."""
    return _sine(code, x, 0.0)


def cos(code: Code, x: Reg) -> Reg:
    """The cosine of x radians."""
    return _sine(code, x, 0.5)


def _sine(code: Code, x: Reg, shift: float) -> Reg:
    """sin(x + shift π)."""
    magic = format_of(x).magic
    half_turns = code.fma(x, 1 / math.pi, shift or magic)
    whole = code.binary("fadd", half_turns, magic) if shift else half_turns
    n = code.binary("fsub", whole, magic)
    r = _subtract_pi(code, x, code.binary("fsub", n, shift) if shift else n)
    huge = code.compare("fcmp ogt", absolute(code, x), _HUGE)
    return replace_rare_lanes(
        code, huge, x, _signed_sine(code, r, whole), f"{'cos' if shift else 'sin'}_of_huge", _huge(shift)
    )


def _subtract_pi(code: Code, x: Reg, n: Reg) -> Reg:
    """x - n π."""
    for part in _PI:
        x = code.fma(n, -part, x)
    return x


def _signed_sine(code: Code, r: Reg, whole: Reg) -> Reg:
    """(-1)^n sin(r), n in the low bits of `whole`."""
    square = code.binary("fmul", r, r)
    # The addend 0 keeps the polynomial's product from being -0, so that r = -0 gives -0.
    size = code.fma(r, code.fma(square, polynomial(code, square, _SIN), 0.0), r)
    integer = r.type.integer.scalar
    sign = code.binary("shl", code.cast("bitcast", whole, integer), r.type.bits - 1)
    return code.cast("bitcast", code.binary("xor", code.cast("bitcast", size, integer), sign), r.type.scalar)


def _huge(shift: float) -> Callable[[Code, Reg], Reg]:
    """`_sine` of large numbers, slow but exact."""

    def sine(code: Code, x: Reg) -> Reg:
        high, low = turns(code, code.cast("fpext", x, "double"))
        n = code.intrinsic("llvm.rint", code.binary("fadd", high, shift))
        remainder = code.binary("fadd", code.binary("fsub", high, code.binary("fsub", n, shift)), low)
        r = code.cast("fptrunc", code.binary("fmul", remainder, math.pi), "float")
        whole = code.binary("fadd", code.cast("fptrunc", n, "float"), format_of(x).magic)
        return _signed_sine(code, r, whole)

    return sine


_TAN_SIN = (-0.1666666664160309, 0.008333329382209218, -0.0001983933348908713, 2.7182978158832357e-06)
"""(sin(r) / r - 1) / r² by powers of r², |r| <= π / 4."""
_TAN_COS = (
    -0.4999999999954458,
    0.04166666656194471,
    -0.0013888881070127982,
    2.4799039015620288e-05,
    -2.717994307361908e-07,
)
"""(cos(r) - 1) / r² by powers of r²."""
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17)
"""π / 2 as two float64."""
_HUGE_OF_WIDE = 2.0**30


def tan(code: Code, x: Reg) -> Reg:
    """The tangent of float32 numbers in float64, to float32's precision; x = n π / 2 + r."""
    magic = format_of(x).magic
    whole = code.fma(x, 2 / math.pi, magic)
    n = code.binary("fsub", whole, magic)
    r = x
    for part in _HALF_PI:
        r = code.fma(n, -part, r)
    huge = code.compare("fcmp ogt", absolute(code, x), _HUGE_OF_WIDE)
    return replace_rare_lanes(code, huge, x, _tan_of_rest(code, r, whole), "tan_of_huge", _tan_of_huge)


def _tan_of_huge(code: Code, x: Reg) -> Reg:
    high, low = (code.binary("fmul", part, 2.0) for part in turns(code, x))
    n = code.intrinsic("llvm.rint", high)
    r = code.binary("fmul", code.binary("fadd", code.binary("fsub", high, n), low), math.pi / 2)
    return _tan_of_rest(code, r, code.binary("fadd", n, format_of(x).magic))


def _tan_of_rest(code: Code, r: Reg, whole: Reg) -> Reg:
    """Register of tan(n π / 2 + r): tan(r) if n is even, -1 / tan(r) if n is odd.

    `whole` is the float n + `magic` of `format_of`: the lowest bit of its bits is the lowest bit of n.
    """
    square = code.binary("fmul", r, r)
    s = code.fma(r, code.fma(square, polynomial(code, square, _TAN_SIN), 0.0), r)
    c = code.fma(square, polynomial(code, square, _TAN_COS), 1.0)
    bit = code.binary("and", code.cast("bitcast", whole, r.type.integer.scalar), 1)
    odd = code.compare("icmp ne", bit, 0)
    above = code.select(odd, code.unary("fneg", c), s)
    return code.binary("fdiv", above, code.select(odd, s, c))


_ATAN = (
    *(-0.3333333311110326, 0.199999842212929, -0.14285320870021892, 0.11106143225641753, -0.09053628137255913),
    *(0.0751050508551184, -0.06056939434587063, 0.04417880490861137, -0.026547436452507442),
    *(0.011778396271364542, -0.0033263862645904778, 0.0004406751475250337),
)
"""(atan(q) / q - 1) / q² by powers of q², |q| <= 1."""


def atan2(code: Code, y: Reg, x: Reg) -> Reg:
    """The angle of the point (x, y), to float32's precision: atan of the ratio below 1, unfolded to all quadrants."""
    up, right = absolute(code, y), absolute(code, x)
    steep = code.compare("fcmp ogt", up, right)
    small, large = code.select(steep, right, up), code.select(steep, up, right)
    # 0 / 0 is to be 0, and infinity / infinity 1.
    equal = code.select(code.compare("fcmp oeq", large, 0.0), large, 1.0)
    q = code.select(code.compare("fcmp oeq", small, large), equal, code.binary("fdiv", small, large))
    square = code.binary("fmul", q, q)
    angle = code.fma(code.binary("fmul", q, square), polynomial(code, square, _ATAN), q)
    angle = code.select(steep, code.binary("fsub", math.pi / 2, angle), angle)
    left = code.compare("icmp slt", code.cast("bitcast", x, x.type.integer.scalar), 0)
    return with_sign(code, code.select(left, code.binary("fsub", math.pi, angle), angle), y)


def turns(code: Code, x: Reg) -> tuple[Reg, Reg]:
    """x / π modulo 2, as a sum of two float64, for a float64 that is a float32 (Payne and Hanek's reduction).

    The product of x and a 29-bit piece of 1 / π has 53 bits, so it is exact, and so is its remainder modulo 2. Rounding
    errors of the sums are added up, too (Knuth's two-sum).
    """
    high = low = constant(0.0, x.type)
    for number in range(1, 8):
        piece = (_INVERSE_PI >> (208 - 29 * number)) % 2**29 * 2.0 ** (-29 * number)
        product = code.binary("fmul", x, piece)
        term = code.fma(code.intrinsic("llvm.rint", code.binary("fmul", product, 0.5)), -2.0, product)
        total = code.binary("fadd", high, term)
        added = code.binary("fsub", total, high)
        error = code.binary(
            "fadd", code.binary("fsub", high, code.binary("fsub", total, added)), code.binary("fsub", term, added)
        )
        high, low = total, code.binary("fadd", low, error)
    return high, low


def replace_rare_lanes(code: Code, rare: Reg, x: Reg, usual: Reg, name: str, build: Callable[[Code, Reg], Reg]) -> Reg:
    """`usual`, with the slow `build(x)` in rare lanes. If any lane is rare, `build` is called for all."""

    def body(inner: Code, x: Reg) -> None:
        inner.ret(build(inner, x))

    def compute() -> Reg:
        full = code.module.function(f"{name}.{x.type.suffix}", [("x", x.type)], body, x.type)
        return code.select(rare, code.call(full, x.type, x), usual)

    return code.compute_if(any_lane(code, rare), usual, compute)


def any_lane(code: Code, condition: Reg) -> Reg:
    """True if the condition holds in any lane."""
    if not condition.type.lanes:
        return condition
    name = f"llvm.vector.reduce.or.{condition.type.suffix}"
    return code.call_external(name, I1, condition)
