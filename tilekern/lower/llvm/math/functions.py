"""Mathematical functions that LLVM has no instruction for.

The code is straight-line, for any number of lanes; a lane has the same bits as a scalar. Errors are at most 2 units of
the last place, also of subnormal results. Infinities, signs of zeros, poles and NaN are as in C99. float32 calls C's
library for lgamma only.

Coefficients: see `exponentials`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, constant
from tilekern.lower.llvm.math.erf import erf_inv, erfc
from tilekern.lower.llvm.math.exponentials import absolute, clamp, exp, exp2, expm1, log, polynomial, with_sign
from tilekern.lower.llvm.math.gamma import lgamma
from tilekern.lower.llvm.math.libm import emit_libm
from tilekern.lower.llvm.math.trigonometry import cos, sin
from tilekern.lower.llvm.math.via_float64 import emit_via_float64


def emit_function(code: Code, name: str, *operands: Reg) -> Reg | None:
    """Emit a function of float32 or float64 operands, scalars or vectors.

    Args:
      code: the function to emit in.
      name: a row of `tilekern.ir.elementwise`.
      operands: of one type, which is also the result's.

    Returns:
      None if LLVM has an instruction for it.
    """
    is_float = operands[0].type.scalar == "float"
    own = _EITHER | (_FLOAT if is_float else _DOUBLE)
    if name in own:
        return own[name](code, *operands)
    return (emit_via_float64 if is_float else emit_libm)(code, name, *operands)


def _logistic(code: Code, x: Reg) -> Reg:
    """1 / (1 + e^-x) = 1 - t, left of 0 as e^x (1 - t), with t = e / (1 + e) and e = e^-|x|."""
    e = exp(code, code.unary("fneg", absolute(code, x)))
    t = code.binary("fdiv", e, code.binary("fadd", e, 1.0))
    factor = code.select(code.compare("fcmp olt", x, 0.0), e, 1.0)
    return code.fma(code.unary("fneg", factor), t, factor)


def _expm1(code: Code, x: Reg) -> Reg:
    """Half of the result, twice: 2^n of the largest results is infinite."""
    half = expm1(code, clamp(code, x, -104.0, 89.0), power=0.5)
    return with_sign(code, code.binary("fadd", half, half), x)


_TANH = (-0.3333328068256378, 0.13331405818462372, -0.05373651534318924, 0.02062816731631756, -0.005692295264452696)
"""(tanh(x) / x - 1) / x² by powers of x², |x| <= 5/8."""


def _tanh(code: Code, x: Reg) -> Reg:
    """1 - 2 / (e^2x + 1), and a polynomial near 0, where that cancels."""
    size = absolute(code, x)
    square = code.binary("fmul", x, x)
    near = code.fma(code.binary("fmul", size, square), polynomial(code, square, _TANH), size)
    # The rounding error of the exponent matters little: where it is large, the subtracted quotient is small.
    up = exp2(code, code.binary("fmul", size, 2.885390081777927))
    far = code.binary("fsub", 1.0, code.binary("fdiv", 2.0, code.binary("fadd", up, 1.0)))
    return with_sign(code, code.select(code.compare("fcmp olt", size, 0.625), near, far), x)


_ERF_NEAR = (
    *(0.12837915122509003, -0.3761250376701355, 0.11281921714544296),
    *(-0.026770493015646935, 0.004998958203941584, -0.0006020785658620298),
)
"""erf(x) / x - 1 by powers of x², |x| <= 0.9."""
_ERF_FAR = (
    *(-1.6282790899276733, -0.9163971543312073, -0.15315493941307068, 0.03418383374810219),
    *(-0.00520850857719779, 0.0004542097158264369, -1.5047466149553657e-05),
)
"""log2(erfc(x)) / x by powers of x, 0.9 <= x <= 4."""


def _erf(code: Code, x: Reg) -> Reg:
    """1 - erfc(x), with erfc as a power of 2, and a polynomial near 0."""
    size = absolute(code, x)
    square = code.binary("fmul", x, x)
    near = code.fma(size, polynomial(code, square, _ERF_NEAR), size)
    bounded = clamp(code, size, high=4.0)
    exponent = code.binary("fmul", bounded, polynomial(code, bounded, _ERF_FAR))
    far = code.binary("fsub", 1.0, exp2(code, exponent))
    return with_sign(code, code.select(code.compare("fcmp olt", size, 0.9), near, far), x)


def _rsqrt(code: Code, x: Reg) -> Reg:
    return code.binary("fdiv", constant(1.0, x.type), code.intrinsic("llvm.sqrt", x))


def _cbrt(code: Code, x: Reg) -> Reg:
    """exp(log(x) / 3), and a step of Newton's method."""
    size = absolute(code, x)
    y = exp(code, code.binary("fmul", log(code, size), 1 / 3))
    error = code.binary("fsub", y, code.binary("fdiv", size, code.binary("fmul", y, y)))
    y = code.fma(error, -1 / 3, y)
    inside = code.binary("and", code.compare("fcmp ogt", size, 0.0), code.compare("fcmp olt", size, math.inf))
    return code.select(inside, with_sign(code, y, x), x)


_EITHER: dict[str, Callable[..., Reg]] = {
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "cbrt": _cbrt,
    "logistic": _logistic,
    "rsqrt": _rsqrt,
}
_FLOAT: dict[str, Callable[..., Reg]] = {
    "expm1": _expm1,
    "tanh": _tanh,
    "erf": _erf,
    "sin": sin,
    "cos": cos,
}
_DOUBLE: dict[str, Callable[..., Reg]] = {
    "erfc": erfc,
    "erf_inv": erf_inv,
    "lgamma": lgamma,
}
