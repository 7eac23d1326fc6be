"""erfc and erf_inv of float64."""

from __future__ import annotations

import math
from fractions import Fraction

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, constant
from tilekern.lower.llvm.math.double_double import divide, evaluate_series, fast_two_sum, multiply, two_sum
from tilekern.lower.llvm.math.exponentials import (
    absolute,
    clamp,
    exp,
    format_of,
    polynomial,
    scale,
    split_exp,
    with_sign,
)
from tilekern.lower.llvm.math.libm import call_libm

_CENTRE = 4.0
_ERFC = (
    Fraction("0.684997288125306949776152414361"),
    Fraction("-0.199344582800367081573899327378"),
    *(0.11704966551044234, -0.048080381221307554, 0.003962055681298543, 0.015312509679281607),
    *(-0.017515654646707273, 0.012161784753482981, -0.006068735217820245, 0.0021164215783433553),
    *(-0.0003897674976038628, -6.013673614574881e-05, 6.403278405702459e-05, -1.3151278201303288e-05),
    *(-4.138632068670408e-06, 2.6506319407962198e-06, 4.6516780968605824e-09, -3.647813819765949e-07),
    *(5.0225937955575116e-08, 4.753444161904874e-08, -1.027075676329994e-08, -6.177288689799159e-09),
    *(1.0579945224139976e-09, 5.88960608840375e-10),
)
"""(1 + x) e^(x²) erfc(x) by powers of (x - 4) / (x + 4), 0 <= x <= 27.25: minimax of the relative error (Remez's
algorithm), 2^-57 after rounding. The variable is that of Shepherd and Laframboise (1981)."""

_WINITZKI = 0.147


def erfc(code: Code, x: Reg) -> Reg:
    """e^-x² times a polynomial, partly in double-double, so that only the result is rounded."""
    size = clamp(code, absolute(code, x), high=27.25)
    square = code.binary("fmul", size, size)
    lost = code.fma(size, size, code.unary("fneg", square))
    n, r = split_exp(code, code.unary("fneg", square))
    r = code.binary("fsub", r, lost)
    one = constant(1.0, x.type)
    high, low = fast_two_sum(code, one, r)
    decay = high, code.fma(code.binary("fmul", r, r), polynomial(code, r, format_of(x).exp), low)
    centre = constant(_CENTRE, x.type)
    t = divide(code, two_sum(code, size, code.unary("fneg", centre)), two_sum(code, size, centre))
    above = multiply(code, decay, evaluate_series(code, t, _ERFC, 2))
    result = scale(code, divide(code, above, two_sum(code, one, size))[0], n)
    return code.select(code.compare("fcmp olt", x, 0.0), code.binary("fsub", 2.0, result), result)


def erf_inv(code: Code, x: Reg) -> Reg:
    """Halley's method, from Winitzki's approximation (2008), eq. 7, whose relative error is 0.2 percent.

    Each step triples the digits. Away from 0 it solves for erfc, which keeps its digits where erf is flat.
    """
    size = absolute(code, x)
    left = code.binary("fsub", 1.0, size)
    log = call_libm(code, "log1p", code.unary("fneg", code.binary("fmul", size, size)))
    half = code.fma(log, 0.5, 2 / (math.pi * _WINITZKI))
    root = code.intrinsic("llvm.sqrt", code.fma(log, -1 / _WINITZKI, code.binary("fmul", half, half)))
    y = code.intrinsic("llvm.sqrt", code.binary("fsub", root, half))
    small = code.compare("fcmp olt", size, 0.5)
    for _ in range(3):
        error = code.select(
            small,
            code.binary("fsub", call_libm(code, "erf", y), size),
            code.binary("fsub", left, erfc(code, y)),
        )
        slope = code.binary("fmul", exp(code, code.binary("fmul", y, y)), math.sqrt(math.pi) / 2)
        step = code.binary("fmul", error, slope)
        y = code.binary("fsub", y, code.binary("fdiv", step, code.fma(y, step, 1.0)))
    y = code.select(code.compare("fcmp oeq", size, 1.0), math.inf, y)
    return with_sign(code, y, x)
