"""Functions of float32 that are computed in float64, where plain formulas may lose digits.

Coefficients: minimax of the result's relative error (Remez's algorithm), some 2^-30 or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, constant
from tilekern.lower.llvm.math.exponentials import absolute, clamp, exp, expm1, log, log1p, polynomial, with_sign
from tilekern.lower.llvm.math.libm import lgamma
from tilekern.lower.llvm.math.trigonometry import atan2, tan


def emit_via_float64(code: Code, name: str, *operands: Reg) -> Reg | None:
    """Emit a function of float32; None if it is not in `_FUNCTIONS`."""
    if name not in _FUNCTIONS:
        return None
    wide = (code.cast("fpext", x, "double") for x in operands)
    return code.cast("fptrunc", _FUNCTIONS[name](code, *wide), "float")


def _half(code: Code, x: Reg) -> Reg:
    return code.binary("fmul", x, 0.5)


def _log2(code: Code, x: Reg) -> Reg:
    return code.binary("fmul", log(code, x), 1 / math.log(2))


def _sinh(code: Code, x: Reg) -> Reg:
    """(e^x - e^-x) / 2 in terms of e^x - 1."""
    e = expm1(code, clamp(code, absolute(code, x), high=100.0))
    quotient = code.binary("fdiv", e, code.binary("fadd", e, 1.0))
    return with_sign(code, _half(code, code.binary("fadd", e, quotient)), x)


def _cosh(code: Code, x: Reg) -> Reg:
    e = exp(code, clamp(code, absolute(code, x), high=100.0))
    return _half(code, code.binary("fadd", e, code.binary("fdiv", 1.0, e)))


def _pow(code: Code, x: Reg, y: Reg) -> Reg:
    """exp(y log|x|), and the special cases of C99, F.9.4.4."""
    size = absolute(code, x)
    result = exp(code, code.binary("fmul", y, log(code, size)))
    # x^0 and 1^y are 1, even if the other operand is NaN.
    is_one = code.binary("or", code.compare("fcmp oeq", y, 0.0), code.compare("fcmp oeq", x, 1.0))
    # (-1)^±infinity is 1, too: infinity counts as even.
    turning = code.binary("and", _is(code, size, 1.0), _is(code, absolute(code, y), math.inf))
    result = code.select(code.binary("or", is_one, turning), 1.0, result)
    whole = _is(code, code.intrinsic("llvm.rint", y), y)
    half = _half(code, y)
    odd = code.binary("and", whole, code.compare("fcmp one", code.intrinsic("llvm.rint", half), half))
    result = code.select(odd, with_sign(code, result, x), result)
    # Negative numbers other than -0 and -infinity have integer powers only.
    negative = code.binary("and", code.compare("fcmp olt", x, 0.0), code.compare("fcmp one", size, math.inf))
    return code.select(
        code.binary("and", negative, code.compare("fcmp one", code.intrinsic("llvm.rint", y), y)), math.nan, result
    )


def _is(code: Code, x: Reg, value: Reg | float) -> Reg:
    return code.compare("fcmp oeq", x, value)


def _side(code: Code, x: Reg) -> Reg:
    """√(1 - x²)."""
    return code.intrinsic("llvm.sqrt", code.fma(code.unary("fneg", x), x, 1.0))


def _atan(code: Code, x: Reg) -> Reg:
    return atan2(code, x, constant(1.0, x.type))


def _asin(code: Code, x: Reg) -> Reg:
    return atan2(code, x, _side(code, x))


def _acos(code: Code, x: Reg) -> Reg:
    return atan2(code, _side(code, x), x)


def _asinh(code: Code, x: Reg) -> Reg:
    """log(|x| + √(x² + 1))."""
    size = absolute(code, x)
    root = code.intrinsic("llvm.sqrt", code.fma(size, size, 1.0))
    return with_sign(code, log1p(code, code.binary("fadd", size, code.binary("fsub", root, 1.0))), x)


def _acosh(code: Code, x: Reg) -> Reg:
    """log(x + √(x² - 1)); left of 1 the root of a negative number."""
    above = code.binary("fsub", x, 1.0)
    roots = [code.intrinsic("llvm.sqrt", r) for r in (above, code.binary("fadd", x, 1.0))]
    return log1p(code, code.fma(roots[0], roots[1], above))


def _atanh(code: Code, x: Reg) -> Reg:
    """log((1 + |x|) / (1 - |x|)) / 2."""
    size = absolute(code, x)
    ratio = code.binary("fdiv", code.binary("fadd", size, size), code.binary("fsub", 1.0, size))
    return with_sign(code, _half(code, log1p(code, ratio)), x)


_ERFC = (
    *(1.2530080582779362, -0.13562110640878428, -0.0475622958624318, 0.12964517515180793, -0.11927361120779195),
    *(0.06830777255467523, -0.02377124354228734, 0.0025308545269848623, 0.0018934941321285357),
    *(-0.0007822054955470025, -0.00011992379382872093, 0.00011977218511586635, 2.175380371575567e-05),
    -4.0307203967960484e-06,
)
"""(1 + 2 x) e^(x²) erfc(x) by powers of (x - 3) / (x + 3), 0 <= x <= 10.2; the variables are those of Shepherd and
Laframboise (1981)."""


def _erfc(code: Code, x: Reg) -> Reg:
    size = clamp(code, absolute(code, x), high=10.2)
    t = code.binary("fdiv", code.binary("fsub", size, 3.0), code.binary("fadd", size, 3.0))
    decay = exp(code, code.unary("fneg", code.binary("fmul", size, size)))
    result = code.binary("fdiv", code.binary("fmul", decay, polynomial(code, t, _ERFC)), code.fma(size, 2.0, 1.0))
    return code.select(code.compare("fcmp olt", x, 0.0), code.binary("fsub", 2.0, result), result)


_ERF_INV_NEAR = (
    *(1.5014093516920834, 0.2466402757859854, -0.004177324633918873, -0.0012527048761002972, 0.00021826355593153443),
    *(-4.998760172970827e-06, -3.4260117387778116e-06, 4.796988403060095e-07, 1.645718063531332e-08),
    *(-1.1023187504228596e-08, 4.370330957167885e-10, 1.328561788570352e-10),
)
"""erf_inv(x) / x by powers of w - 5/2 with w = -log(1 - x²), w <= 5: the variables are those of Giles (2010)."""
_ERF_INV_FAR = (
    *(3.083885610943276, 1.0052589960640617, 0.005370887253080257, -0.0037520042710852733, 0.0024916426339182812),
    *(-0.0016819547898443811, 0.0009533595103870498, -0.00037601580398330793, 2.0954889861212856e-05),
    *(0.00010039061826971814, -4.0855974374670894e-05, -8.635344758521213e-06),
)
"""The same by powers of √w - 13/4, 5 <= w <= 16.7."""


def _erf_inv(code: Code, x: Reg) -> Reg:
    w = code.unary("fneg", log(code, code.fma(code.unary("fneg", x), x, 1.0)))
    near = polynomial(code, code.binary("fsub", w, 2.5), _ERF_INV_NEAR)
    far = polynomial(code, code.binary("fsub", code.intrinsic("llvm.sqrt", w), 3.25), _ERF_INV_FAR)
    result = code.binary("fmul", x, code.select(code.compare("fcmp olt", w, 5.0), near, far))
    return code.select(_is(code, absolute(code, x), 1.0), with_sign(code, constant(math.inf, x.type), x), result)


_FUNCTIONS: dict[str, Callable[..., Reg]] = {
    "pow": _pow,
    "atan2": atan2,
    "log2": _log2,
    "log1p": log1p,
    "tan": tan,
    "asin": _asin,
    "acos": _acos,
    "atan": _atan,
    "sinh": _sinh,
    "cosh": _cosh,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "erfc": _erfc,
    "erf_inv": _erf_inv,
    "lgamma": lgamma,
}
