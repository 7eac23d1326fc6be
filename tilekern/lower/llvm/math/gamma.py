"""log|Γ(x)| of float64: Stirling's series in double-double arithmetic, precise rather than fast.

Near the zeros of log|Γ|, double-double has too few digits, too; a table has Taylor series there.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import F64, Reg, constant
from tilekern.lower.llvm.math.double_double import (
    DoubleDouble,
    add,
    divide,
    evaluate_series,
    from_exact,
    log_abs,
    multiply,
    negate,
    two_sum,
)
from tilekern.lower.llvm.math.exponentials import absolute, clamp, log
from tilekern.lower.llvm.math.libm import call_libm, for_each_lane

_ZEROS = (
    (1.0, 0.0, -0.5772156649015329, 0.8224670334241132),
    (2.0, 0.0, 0.42278433509846713, 0.3224670334241132),
    (-2.4570247382208006, 5.619192358950097e-17, 1.5156034480216576, 4.8583209516339965),
    (-2.7476826467274127, 1.733509244024501e-16, -1.9143501856116005, 9.575189475709672),
    (-3.14358088834998, 1.6978655906121085e-15, 7.7818846581313625, 25.831338372388032),
    (-3.955294284858598, -4.14382750757705e-16, -20.725060845803696, 251.71468258688918),
    (-4.039361839740537, -5.664578074060335e-15, 26.790480886140458, 324.2553229378437),
    (-4.991544640560048, 1.7683619350849613e-14, -116.53578161624576, 6995.235954894315),
    (-5.0082181683225935, 5.4188509265538106e-15, 123.36218456335405, 7404.762432228761),
    (-5.998607480080875, -2.3721063667118474e-13, -716.2454304273765, 257851.58963943998),
    (-6.001385294453155, -4.6433836942838004e-14, 723.7366299252467, 260548.41030306983),
    (-6.999801507890638, 5.313011065735902e-14, -5035.967373768393, 12690641.166048529),
    (-7.000198333407325, -1.263203743493977e-12, 5044.0299411044625, 12710958.833919294),
)
"""The float64 nearest to the zeros of log|Γ| down to -7.5, and the coefficients of Taylor's series there: log|Γ|, ψ and
ψ' / 2 (mpmath, 500 bits). Further left, no float64 is so close to a zero that
double-double is not precise enough."""

_LARGEST = 2.556348163871691e305
"""The largest x with a finite log|Γ(x)|."""
_LEAST = -20.5
"""Below this, the reflection replaces the product: double-double's digits are no longer needed."""
_ENOUGH = 16
"""Stirling's series is used from here on: its terms fall to 2^-107."""
_HALF_LOG_TAU = Fraction("0.9189385332046727417803297364056176398614")


def lgamma(code: Code, x: Reg) -> Reg:
    """log|Γ(x)|, infinite at poles."""
    name = code.module.function("lgamma.f64", [("x", F64)], _lane, F64, inline=False)

    def lane(x: Reg) -> Reg:
        return code.call(name, F64, x)

    return for_each_lane(code, lane, x)


def _lane(code: Code, x: Reg) -> None:
    result = _near_zero(code, x, _of_stirling(code, x))
    # For tiny x, 1 / Γ(x) is x, and the lower half of the product might be subnormal.
    size = absolute(code, x)
    tiny = code.compare("fcmp olt", size, 2.0**-60)
    result = code.select(tiny, code.unary("fneg", log(code, size)), result)
    whole = code.compare("fcmp oeq", code.intrinsic("llvm.rint", x), x)
    pole = code.binary("and", whole, code.compare("fcmp ole", x, 0.0))
    infinite = code.binary("or", pole, code.compare("fcmp ogt", x, _LARGEST))
    code.ret(code.select(infinite, math.inf, result))


def _of_stirling(code: Code, x: Reg) -> Reg:
    """log Γ(x + n) - log|x (x + 1) ... (x + n - 1)|, or -log Γ(-x) - log|x sin(π x) / π|."""
    reflected = code.compare("fcmp olt", x, _LEAST)
    missing = code.binary("fsub", float(_ENOUGH), code.intrinsic("llvm.floor", clamp(code, x, _LEAST, _ENOUGH)))
    n = code.select(reflected, 0.0, missing)

    def factor(index: Reg, high: Reg, low: Reg) -> DoubleDouble:
        return multiply(code, (high, low), two_sum(code, x, code.cast("sitofp", index, "double")))

    high, low = code.loop(0, code.saturating_to_int(n, "i64", signed=True), 1, factor, *from_exact(1.0, F64))
    divisor = log_abs(code, (code.select(reflected, _reflection(code, x), high), low))
    stirling = _stirling(code, two_sum(code, code.select(reflected, absolute(code, x), x), n))
    sign = code.select(reflected, constant(-1.0, F64), 1.0)
    signed = code.binary("fmul", stirling[0], sign), code.binary("fmul", stirling[1], sign)
    return add(code, signed, negate(code, divisor))[0]


def _reflection(code: Code, x: Reg) -> Reg:
    """x sin(π x) / π, up to its sign."""
    fraction = code.binary("fsub", x, code.intrinsic("llvm.rint", x))
    return code.binary(
        "fmul", x, code.binary("fdiv", call_libm(code, "sin", code.binary("fmul", fraction, math.pi)), math.pi)
    )


def _stirling(code: Code, z: DoubleDouble) -> DoubleDouble:
    """(z - 1/2) (log z - 1) + (log(2 π) - 1) / 2 + 1 / (12 z) - ..., z >= 16 (Abramowitz and Stegun 6.1.41)."""
    main = multiply(code, add(code, z, from_exact(-0.5, F64)), add(code, log_abs(code, z), from_exact(-1.0, F64)))
    inverse = divide(code, from_exact(1.0, F64), z)
    series = multiply(
        code, inverse, evaluate_series(code, multiply(code, inverse, inverse), _stirling_coefficients(), 8)
    )
    return add(code, main, add(code, from_exact(_HALF_LOG_TAU - Fraction(1, 2), F64), series))


@cache
def _stirling_coefficients() -> list[Fraction]:
    """B / (k (k - 1)) for k = 2, 4, ..., with the Bernoulli numbers B by their recurrence."""
    numbers = [Fraction(1)]
    for n in range(1, 37):
        numbers.append(-sum((math.comb(n + 1, k) * b for k, b in enumerate(numbers)), Fraction(0)) / (n + 1))
    return [numbers[k] / (k * (k - 1)) for k in range(2, 37, 2)]


def _near_zero(code: Code, x: Reg, result: Reg) -> Reg:
    """Taylor's series close to a zero, where its next term is below 2^-58 of the first; else `result`."""
    for zero, value, slope, bend in _ZEROS:
        away = code.binary("fsub", x, zero)
        near = code.compare("fcmp olt", absolute(code, away), 2.0**-30 * abs(slope / bend))
        curved = code.fma(code.binary("fmul", away, away), bend, value)
        result = code.select(near, code.fma(away, slope, curved), result)
    return result
