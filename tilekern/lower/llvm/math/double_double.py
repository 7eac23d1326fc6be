"""Double-double arithmetic: a number is the sum of two float64, the second at most half a unit of the first.

Relative errors are about 2^-102 of the largest operand (Joldes, Muller and Popescu 2017), unless a number is subnormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, constant
from tilekern.lower.llvm.math.exponentials import absolute, polynomial, split_log

DoubleDouble = tuple[Reg, Reg]

_LN2 = Fraction("0.6931471805599453094172321214581765680755")


def from_exact(number: Fraction | float, type: Type) -> DoubleDouble:
    """A constant."""
    high = float(number)
    return constant(high, type), constant(float(Fraction(number) - Fraction(high)), type)


def two_sum(code: Code, a: Reg, b: Reg) -> DoubleDouble:
    """a + b, exactly (Knuth)."""
    total = code.binary("fadd", a, b)
    added = code.binary("fsub", total, a)
    lost = code.binary("fsub", a, code.binary("fsub", total, added))
    return total, code.binary("fadd", lost, code.binary("fsub", b, added))


def fast_two_sum(code: Code, a: Reg, b: Reg) -> DoubleDouble:
    """a + b, exactly if a is 0 or no smaller than b (Dekker)."""
    total = code.binary("fadd", a, b)
    return total, code.binary("fsub", b, code.binary("fsub", total, a))


def add(code: Code, a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """a + b."""
    high, low = two_sum(code, a[0], b[0])
    return fast_two_sum(code, high, code.binary("fadd", low, code.binary("fadd", a[1], b[1])))


def multiply(code: Code, a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """a b."""
    high = code.binary("fmul", a[0], b[0])
    low = code.fma(a[0], b[0], code.unary("fneg", high))
    return fast_two_sum(code, high, code.binary("fadd", low, code.fma(a[0], b[1], code.binary("fmul", a[1], b[0]))))


def divide(code: Code, a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """a / b."""
    high = code.binary("fdiv", a[0], b[0])
    negative = code.unary("fneg", high)
    remainder = code.binary("fadd", code.fma(negative, b[0], a[0]), code.fma(negative, b[1], a[1]))
    return fast_two_sum(code, high, code.binary("fdiv", remainder, b[0]))


def negate(code: Code, a: DoubleDouble) -> DoubleDouble:
    """-a."""
    return code.unary("fneg", a[0]), code.unary("fneg", a[1])


def evaluate_series(code: Code, x: DoubleDouble, coefficients: Sequence[Fraction | float], exact: int) -> DoubleDouble:
    """A polynomial, the lowest coefficient first: `exact` terms in double-double, the smaller ones in float64."""
    total = polynomial(code, x[0], [float(c) for c in coefficients[exact:]]), constant(0.0, x[0].type)
    for c in reversed(coefficients[:exact]):
        total = add(code, from_exact(c, x[0].type), multiply(code, x, total))
    return total


def log_abs(code: Code, x: DoubleDouble) -> DoubleDouble:
    """log|x| = e ln 2 + log m with |x| = 2^e m and 3/4 <= m < 3/2, for normal numbers.

    log m = 2 artanh s = 2 s (1 + s² / 3 + s⁴ / 5 + ...) with s = (m - 1) / (m + 1), which is no more than 1/5: 22 terms
    reach 2^-108 of the first one, and from the 13th on they are below 2^-60.
    """
    m, e = split_log(code, absolute(code, x[0]))
    scaled = code.binary("fmul", x[1], code.binary("fdiv", m, x[0]))
    f = two_sum(code, code.binary("fsub", m, 1.0), scaled)
    s = divide(code, f, add(code, f, from_exact(2.0, m.type)))
    artanh = multiply(
        code, s, evaluate_series(code, multiply(code, s, s), [Fraction(2, 2 * k + 1) for k in range(22)], 12)
    )
    return add(code, multiply(code, (e, constant(0.0, e.type)), from_exact(_LN2, e.type)), artanh)
