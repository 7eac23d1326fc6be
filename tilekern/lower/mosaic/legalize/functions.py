"""Write functions of float32 that Mosaic lacks by functions that it has.

Needs: a Func after `legalize_dtypes`. Gives: a Func of the functions that Mosaic compiles, on tiles and on scalars. The
errors are a few units of the last place. A second formula covers the range where the first one loses digits or
overflows.

Coefficients: Cephes (S. Moshier, single/asinf.c, single/ndtrf.c); for lgamma, the approximation of Lanczos with g = 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import F32, kind_of

INF, NAN = math.inf, math.nan


def expand_functions(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, Elementwise) or kind_of(op.operands[0].tile.dtype) != "float":
        return None
    make = Make(rewriter, op)
    if op.function in _FUNCTIONS:
        return [_FUNCTIONS[op.function](make, *op.operands)]
    if op.result.tile.shape == ():
        return _of_scalar(make, op)
    return None


def _of_scalar(make: Make, op: Elementwise) -> Sequence[Value] | None:
    """Functions that the scalar unit lacks, computed on a tile of one element."""
    if op.function not in ("pow", "logistic"):
        return None
    tiles = [make.broadcast(x, (1, 1), ()) for x in op.operands]
    return [make.reshape(make.of(op.function, *tiles), ())]


def polynomial(make: Make, x: Value, coefficients: Sequence[float]) -> Value:
    """A polynomial by Horner's rule, the highest coefficient first."""
    total = make.number(coefficients[0], x.tile)
    for c in coefficients[1:]:
        total = make.of("add", make.of("mul", total, x), c)
    return total


def _with_sign(make: Make, size: Value, x: Value) -> Value:
    """A magnitude with the sign of `x`."""
    sign = make.of("and", make.bits(x, signed=True), -(1 << 31))
    return make.bitcast(make.of("or", make.bits(size, signed=True), sign), F32)


def _sign(make: Make, x: Value) -> Value:
    """1 or -1; zeros and NaN stay as they are."""
    return make.select(make.of("gt", x, 0.0), 1.0, make.select(make.of("lt", x, 0.0), make.number(-1, x.tile), x))


def _cbrt(make: Make, x: Value) -> Value:
    """exp2(log2(x) / 3), refined by two steps of Newton's method."""
    size = make.of("abs", x)
    y = make.of("exp2", make.of("mul", make.of("log2", size), 1 / 3))
    for _ in range(2):
        error = make.of("sub", y, make.of("div", size, make.of("mul", y, y)))
        y = make.of("sub", y, make.of("mul", error, 1 / 3))
    inside = make.of("and", make.of("gt", size, 0.0), make.of("lt", size, INF))
    return make.select(inside, _with_sign(make, y, x), x)


def _expm1(make: Make, x: Value) -> Value:
    """Taylor's series for |x| < 1, where exp(x) - 1 would lose digits."""
    series = polynomial(make, x, [1 / math.factorial(n) for n in range(12, 1, -1)])
    near = make.of("add", x, make.of("mul", make.of("mul", x, x), series))
    far = make.of("sub", make.of("exp", x), 1.0)
    return make.select(make.of("lt", make.of("abs", x), 1.0), near, far)


def _exponentials(make: Make, x: Value) -> tuple[Value, Value]:
    """exp(|x|) / 2 and exp(-|x|) / 2, from exp(|x| / 2), which overflows later than exp(|x|)."""
    root = make.of("exp", make.of("mul", make.of("abs", x), 0.5))
    return make.of("mul", make.of("mul", root, 0.5), root), make.of("div", make.of("div", 0.5, root), root)


def _sinh(make: Make, x: Value) -> Value:
    square = make.of("mul", x, x)
    series = polynomial(make, square, [1 / math.factorial(n) for n in (11, 9, 7, 5, 3)])
    near = make.of("add", x, make.of("mul", make.of("mul", x, square), series))
    up, down = _exponentials(make, x)
    far = _with_sign(make, make.of("sub", up, down), x)
    return make.select(make.of("lt", make.of("abs", x), 1.0), near, far)


def _cosh(make: Make, x: Value) -> Value:
    return make.of("add", *_exponentials(make, x))


def _asin_small(make: Make, x: Value) -> Value:
    """asin(x) for |x| <= 1/2."""
    square = make.of("mul", x, x)
    cephes = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
    return make.of("add", make.of("mul", make.of("mul", polynomial(make, square, cephes), square), x), x)


def _folded(make: Make, size: Value) -> Value:
    """asin(√((1 - |x|) / 2)), half of acos(|x|)."""
    return _asin_small(make, make.of("sqrt", make.of("mul", make.of("sub", 1.0, size), 0.5)))


def _asin(make: Make, x: Value) -> Value:
    size = make.of("abs", x)
    far = make.of("sub", math.pi / 2, make.of("mul", _folded(make, size), 2.0))
    return make.select(make.of("gt", size, 0.5), _with_sign(make, far, x), _asin_small(make, x))


def _acos(make: Make, x: Value) -> Value:
    twice = make.of("mul", _folded(make, make.of("abs", x)), 2.0)
    near = make.of("sub", math.pi / 2, _asin_small(make, x))
    far = make.select(make.of("gt", x, 0.0), twice, make.of("sub", math.pi, twice))
    return make.select(make.of("gt", make.of("abs", x), 0.5), far, near)


def _atan(make: Make, x: Value) -> Value:
    return make.of("atan2", x, 1.0)


def _asinh(make: Make, x: Value) -> Value:
    """log(|x| + √(x² + 1)), as log1p(|x| + x² / (√(x² + 1) + 1)); log(2 |x|) beyond 1e8."""
    size = make.of("abs", x)
    square = make.of("mul", size, size)
    root = make.of("add", make.of("sqrt", make.of("add", square, 1.0)), 1.0)
    near = make.of("log1p", make.of("add", size, make.of("div", square, root)))
    far = make.of("add", make.of("log", size), math.log(2))
    return _with_sign(make, make.select(make.of("gt", size, 1e8), far, near), x)


def _acosh(make: Make, x: Value) -> Value:
    above = make.of("sub", x, 1.0)
    root = make.of("sqrt", make.of("mul", above, make.of("add", above, 2.0)))
    near = make.of("log1p", make.of("add", above, root))
    far = make.of("add", make.of("log", x), math.log(2))
    result = make.select(make.of("gt", x, 1e8), far, near)
    return make.select(make.of("lt", x, 1.0), NAN, result)


def _atanh(make: Make, x: Value) -> Value:
    size = make.of("abs", x)
    ratio = make.of("div", make.of("mul", size, 2.0), make.of("sub", 1.0, size))
    result = _with_sign(make, make.of("mul", make.of("log1p", ratio), 0.5), x)
    return make.select(make.of("gt", size, 1.0), NAN, result)


_ERFC_BELOW_2 = (
    *(2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1),
    *(6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1),
)
_ERFC_ABOVE_2 = (
    *(-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503e0, 2.921019019210786e0),
    *(-1.015265279202700e0, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1),
)


def _erfc(make: Make, x: Value) -> Value:
    """1 - erf(x) for |x| <= 1; beyond, exp(-x²) / x times a polynomial of 1 / x²."""
    size = make.of("abs", x)
    inverse = make.of("div", 1.0, size)
    square = make.of("mul", inverse, inverse)
    below = polynomial(make, square, _ERFC_BELOW_2)
    above = polynomial(make, square, _ERFC_ABOVE_2)
    tail = make.of("mul", make.select(make.of("lt", size, 2.0), below, above), inverse)
    # x² = h² + (x - h) (x + h), where h is x cut to half of its digits, so that h² is exact.
    high = make.bitcast(make.of("and", make.bits(size, signed=True), -(1 << 12)), F32)
    remainder = make.of("mul", make.of("sub", size, high), make.of("add", size, high))
    decay = make.of(
        "mul", make.of("exp", make.of("neg", make.of("mul", high, high))), make.of("exp", make.of("neg", remainder))
    )
    far = make.of("mul", decay, tail)
    far = make.select(make.of("gt", size, 11.0), 0.0, far)
    far = make.select(make.of("lt", x, 0.0), make.of("sub", 2.0, far), far)
    return make.select(make.of("gt", size, 1.0), far, make.of("sub", 1.0, make.of("erf", x)))


_LANCZOS = (
    *(676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894),
    *(-176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707),
    *(9.984369578019570859563e-6, 1.50563273514931155834e-7),
)


def _lgamma(make: Make, x: Value) -> Value:
    """log|Γ(x)|; below 1/2 by the reflection Γ(x) Γ(1 - x) = π / sin(π x)."""
    reflected = make.of("lt", x, 0.5)
    z = make.select(reflected, make.of("neg", x), make.of("sub", x, 1.0))
    total = make.number(0.99999999999980993227684700473478, x.tile)
    for n, c in enumerate(_LANCZOS, 1):
        total = make.of("add", total, make.of("div", c, make.of("add", z, float(n))))
    t = make.of("add", z, 7.5)
    log_t = make.of("add", make.of("log1p", make.of("div", z, 7.5)), math.log(7.5))
    # (z + 1/2) log t - t as (z + 1/2 - t / log t) log t, whose terms cancel before they are multiplied.
    power = make.of("mul", make.of("sub", make.of("add", z, 0.5), make.of("div", t, log_t)), log_t)
    right = make.of("add", make.of("add", power, 0.5 * math.log(2 * math.pi)), make.of("log", total))
    size = make.of("abs", x)
    part = make.of("sub", size, make.of("floor", size))
    part = make.select(make.of("gt", part, 0.5), make.of("sub", 1.0, part), part)
    sine = make.of("log", make.of("sin", make.of("mul", part, math.pi)))
    left = make.select(
        make.of("lt", make.of("abs", sine), INF), make.of("sub", make.of("sub", math.log(math.pi), sine), right), INF
    )
    result = make.select(reflected, left, right)
    result = make.select(make.of("eq", size, INF), INF, result)
    return make.select(make.of("ne", x, x), x, result)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "sign": _sign,
    "cbrt": _cbrt,
    "expm1": _expm1,
    "sinh": _sinh,
    "cosh": _cosh,
    "asin": _asin,
    "acos": _acos,
    "atan": _atan,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "erfc": _erfc,
    "lgamma": _lgamma,
}
