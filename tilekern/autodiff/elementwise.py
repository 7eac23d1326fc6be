"""Tangents of the elementwise functions: one row a function. Formulas, and conventions at ties and edges, are JAX's.

A row has a term for each operand: the tangent of the result where only this operand moves. A term is linear in the
tangent of its operand. Its other factors are computed in the dtype of tangents, also factors that reuse the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, reduce

from tilekern.ir.core import Value
from tilekern.ir.make import Make, Number


class Point:
    """The operands and the result of a function, in the dtype of tangents."""

    def __init__(self, make: Make, function: str, operands: Sequence[Value], result: Value | None = None) -> None:
        self.make, self._function, self._operands, self._result = make, function, operands, result

    @property
    def x(self) -> Value:
        """The first operand."""
        return self._operands[0]

    @property
    def y(self) -> Value:
        """The second operand."""
        return self._operands[1]

    @cached_property
    def result(self) -> Value:
        """The result. If the existing result has a narrower dtype, it is computed again, for more exact factors."""
        narrow = self._result is None or self._result.type != self.x.type
        return self.of(self._function, *self._operands) if narrow or self._result is None else self._result

    def of(self, function: str, *operands: Number) -> Value:
        """An elementwise op."""
        return self.make.of(function, *operands)

    def squared(self, x: Value) -> Value:
        """The square."""
        return self.of("mul", x, x)

    def one_minus_square(self, x: Value) -> Value:
        """1 - x², without cancellation."""
        return self.of("mul", self.of("sub", 1, x), self.of("add", 1, x))


Factor = Callable[[Point], Value]
Term = Callable[[Point, Value], Value]
Row = tuple[Term | None, ...]
"""The term of each operand; None if the result does not change with the operand, or only in steps."""


def _times(factor: Factor) -> Term:
    return lambda at, g: at.of("mul", g, factor(at))


def _over(divisor: Factor) -> Term:
    return lambda at, g: at.of("div", g, divisor(at))


def _same(at: Point, g: Value) -> Value:
    return g


def _negated(at: Point, g: Value) -> Value:
    return at.of("neg", g)


def _abs(at: Point, g: Value) -> Value:
    return at.make.select(at.of("ge", at.x, 0), g, at.of("neg", g))


# --- factors of functions of one operand ------------------------------------------------------------------------------


def _rsqrt(at: Point) -> Value:
    return at.of("mul", at.of("div", at.result, at.x), -0.5)


def _tan(at: Point) -> Value:
    return at.of("add", 1, at.squared(at.result))


def _asin(at: Point) -> Value:
    return at.of("rsqrt", at.one_minus_square(at.x))


def _asinh(at: Point) -> Value:
    """rsqrt(x² + 1), of x/s and 1/s with s = max(|x|, 1): no square overflows, and 1/s is not 0 at infinity."""
    largest = 2.0**66 if at.x.tile.dtype.itemsize == 4 else 2.0**514
    scale = at.of("min", at.of("max", at.of("abs", at.x), 1), largest)
    inverse = at.of("div", 1, scale)
    squares = at.of("add", at.squared(at.of("mul", at.x, inverse)), at.squared(inverse))
    return at.of("mul", inverse, at.of("rsqrt", squares))


def _acosh(at: Point) -> Value:
    return at.of("mul", at.of("rsqrt", at.of("sub", at.x, 1)), at.of("rsqrt", at.of("add", at.x, 1)))


def _gauss(at: Point) -> Value:
    """exp(-x²)."""
    return at.of("exp", at.of("neg", at.squared(at.x)))


_UNARY: dict[str, Term] = {
    "neg": _negated,
    "abs": _abs,
    "exp": _times(lambda at: at.result),
    "exp2": _times(lambda at: at.of("mul", at.result, math.log(2))),
    "expm1": _times(lambda at: at.of("exp", at.x)),
    "log": _over(lambda at: at.x),
    "log2": _over(lambda at: at.of("mul", at.x, math.log(2))),
    "log1p": _over(lambda at: at.of("add", at.x, 1)),
    "sqrt": _times(lambda at: at.of("div", 0.5, at.result)),
    "rsqrt": _times(_rsqrt),
    "cbrt": _times(lambda at: at.of("div", 1 / 3, at.squared(at.result))),
    "logistic": _times(lambda at: at.of("mul", at.result, at.of("sub", 1, at.result))),
    "sin": _times(lambda at: at.of("cos", at.x)),
    "cos": _times(lambda at: at.of("neg", at.of("sin", at.x))),
    "tan": _times(_tan),
    "asin": _times(_asin),
    "acos": _times(lambda at: at.of("neg", _asin(at))),
    "atan": _over(lambda at: at.of("add", 1, at.squared(at.x))),
    "sinh": _times(lambda at: at.of("cosh", at.x)),
    "cosh": _times(lambda at: at.of("sinh", at.x)),
    "tanh": _times(lambda at: at.one_minus_square(at.result)),
    "asinh": _times(_asinh),
    "acosh": _times(_acosh),
    "atanh": _over(lambda at: at.one_minus_square(at.x)),
    "erf": _times(lambda at: at.of("mul", _gauss(at), 2 / math.sqrt(math.pi))),
    "erfc": _times(lambda at: at.of("mul", _gauss(at), -2 / math.sqrt(math.pi))),
    "erf_inv": _times(lambda at: at.of("mul", at.of("exp", at.squared(at.result)), math.sqrt(math.pi) / 2)),
}

# --- factors of functions of two operands -----------------------------------------------------------------------------


def _wins(comparison: str, at: Point, x: Value, y: Value) -> Value:
    """The share of `x` in the result: 1 where `x` is the result, 1/2 where `x` equals `y`, else 0."""
    tile = x.tile
    tied = at.make.select(at.of("eq", x, y), at.make.number(0.5, tile), 0)
    return at.make.select(at.of(comparison, x, y), at.make.number(1, tile), tied)


def _divisor(at: Point) -> Value:
    """Derivative of x/y in y."""
    return at.of("neg", at.of("div", at.result, at.y))


def _modulus(at: Point) -> Value:
    """Derivative of the remainder x - trunc(x/y)·y in y."""
    quotient = at.of("div", at.x, at.y)
    whole = at.of("floor", at.of("abs", quotient))
    return at.of("neg", at.of("mul", at.of("sign", quotient), whole))


def _base(at: Point) -> Value:
    """Derivative of x^y in x. It is 0 at y = 0 for every x, also for x = 0."""
    slope = at.of("mul", at.y, at.of("pow", at.x, at.of("sub", at.y, 1)))
    return at.make.select(at.of("eq", at.y, 0), 0, slope)


def _exponent(at: Point) -> Value:
    """Derivative of x^y in y; log x counts as 0 at x = 0."""
    base = at.make.select(at.of("eq", at.x, 0), 1, at.x)
    return at.of("mul", at.of("log", base), at.result)


def _radius_squared(at: Point) -> Value:
    return at.of("add", at.squared(at.x), at.squared(at.y))


_BINARY: dict[str, Row] = {
    "add": (_same, _same),
    "sub": (_same, _negated),
    "mul": (_times(lambda at: at.y), _times(lambda at: at.x)),
    "div": (_over(lambda at: at.y), _times(_divisor)),
    "rem": (_same, _times(_modulus)),
    "max": (_times(lambda at: _wins("gt", at, at.x, at.y)), _times(lambda at: _wins("gt", at, at.y, at.x))),
    "min": (_times(lambda at: _wins("lt", at, at.x, at.y)), _times(lambda at: _wins("lt", at, at.y, at.x))),
    "pow": (_times(_base), _times(_exponent)),
    "atan2": (
        _times(lambda at: at.of("div", at.y, _radius_squared(at))),
        _times(lambda at: at.of("div", at.of("neg", at.x), _radius_squared(at))),
    ),
    "nextafter": (_same, None),
}
_FLAT: dict[str, Row] = {
    **dict.fromkeys(("sign", "floor", "ceil", "round_even", "round_away", "is_finite"), (None,)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (None, None)),
}

ROWS: dict[str, Row] = {name: (term,) for name, term in _UNARY.items()} | _BINARY | _FLAT
"""Maps each function of floats to its row; a function without a row has no derivative rule."""


def moved(at: Point, row: Row, moving: Sequence[Value | None]) -> Value | None:
    """The tangent of the result, the sum of terms; None if all are zero."""
    pairs = zip(row, moving, strict=True)
    terms = [term(at, g) for term, g in pairs if term is not None and g is not None]
    return reduce(lambda a, b: at.of("add", a, b), terms) if terms else None
