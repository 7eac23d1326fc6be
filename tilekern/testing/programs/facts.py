"""Facts about a value of a random program that hold for all inputs: magnitude, granularity, error of backends.

Floats are multiples of a power of two, of a known size. As long as both fit into the mantissa, sums, products, dots and
reductions are exact in any order, fused or not, and every backend must give the same bits. What rounds has an error
from there on: a bound of what two correct backends may differ by. Such a value must not reach an op that jumps (a
comparison, a floor, a cast to integer); `None` as the fact of a result says: do not make this op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import ml_dtypes
import numpy as np

from tilekern.ir.compute import Monoid, Precision
from tilekern.ir.types import BOOL, F32, I32, DType, accumulator, kind_of

# The grain of numbers of which nothing is known: too fine for any exact sum.
FINEST = -(2**20)

# The relative error of the functions of XLA and NumPy, in units of the last place.
_ULPS = 32

# A value that rounds is not larger, and its error is not a larger part of that, or it would prove nothing.
_LARGEST, _LOOSEST = 64.0, 1 / 16


@dataclass(frozen=True)
class Fact:
    """Facts that hold for every element of a value, at any time, on every correct backend.

    Attributes:
      bound: of the magnitude of finite elements.
      grain: finite elements are multiples of 2 ** grain.
      error: how far from each other two backends may be; 0: equal, up to the sign of a zero and the bits of a NaN.
      inf: there may be infinities. There may always be NaNs.
    """

    bound: float
    grain: int = 0
    error: float = 0.0
    inf: bool = False

    def within(self, other: Fact) -> bool:
        """True if the facts of `other` hold for this, too."""
        finer = self.grain >= other.grain or other.error > 0
        return self.bound <= other.bound and finer and self.error <= other.error and self.inf <= other.inf


def union(*facts: Fact) -> Fact:
    """The facts that hold for an element of any of `facts`."""
    return Fact(
        max(f.bound for f in facts),
        min(f.grain for f in facts),
        max(f.error for f in facts),
        any(f.inf for f in facts),
    )


def _info(dtype: DType) -> Any:
    """The properties of a float dtype; ml_dtypes declares no types."""
    return cast(Any, ml_dtypes.finfo(dtype))


def digits(dtype: DType) -> int:
    """The bits of the mantissa of a float, the hidden one included."""
    return int(_info(dtype).nmant) + 1


def roundoff(dtype: DType) -> float:
    """The relative distance of neighbouring floats."""
    return 2.0 ** (1 - digits(dtype))


def limit(dtype: DType) -> float:
    """The largest magnitude of an integer or bool; half of the largest float, so that an error does not overflow."""
    match kind_of(dtype):
        case "bool":
            return 1.0
        case "float":
            return float(_info(dtype).max) / 2
        case _:
            return float(max(-int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)))


def whole(dtype: DType) -> Fact:
    """Facts that hold for any integer or bool."""
    return Fact(limit(dtype))


def exact(fact: Fact, dtype: DType) -> bool:
    """True if `dtype` holds all these numbers, none of them subnormal."""
    inside = fact.bound <= 2.0 ** max(digits(dtype) + fact.grain, -1000)
    return not fact.error and inside and fact.grain >= int(_info(dtype).minexp)


def rounded(fact: Fact | None, dtype: DType) -> Fact | None:
    """The fact of results that are computed exactly, up to the errors of the operands, then rounded to `dtype`."""
    if fact is None:
        return None
    if kind_of(dtype) != "float":
        return Fact(min(fact.bound, limit(dtype)))
    if fact.bound > limit(dtype):
        return None
    if exact(fact, dtype):
        return fact
    error = fact.error + roundoff(dtype) * fact.bound
    return meaningful(Fact(fact.bound, FINEST, error, fact.inf))


def meaningful(fact: Fact) -> Fact | None:
    """A fact that says something; None for an error that is too large."""
    return fact if fact.bound <= _LARGEST and fact.error <= _LOOSEST * fact.bound else None


# --- elementwise ----------------------------------------------------------------------------------------------------

JUMPS = ("eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil", "round_even", "round_away", "rem", "nextafter")
COMPARISONS = JUMPS[:6]


@dataclass(frozen=True)
class Smooth:
    """A function between `low` and `high`: its largest slope and magnitude there."""

    low: float
    high: float
    slope: float
    bound: float


SMOOTH = {
    "exp": Smooth(-4, 4, 55, 55),
    "exp2": Smooth(-4, 4, 11.1, 16),
    "expm1": Smooth(-4, 4, 55, 54),
    "log": Smooth(0.25, 16, 4, 2.8),
    "log2": Smooth(0.25, 16, 5.8, 4),
    "log1p": Smooth(-0.75, 8, 4, 2.2),
    "sqrt": Smooth(0.25, 16, 1, 4),
    "rsqrt": Smooth(0.25, 16, 4, 2),
    "cbrt": Smooth(0.25, 8, 0.85, 2),
    "logistic": Smooth(-8, 8, 0.25, 1),
    "sin": Smooth(-8, 8, 1, 1),
    "cos": Smooth(-8, 8, 1, 1),
    "tan": Smooth(-1, 1, 3.5, 1.6),
    "asin": Smooth(-0.875, 0.875, 2.1, 1.1),
    "acos": Smooth(-0.875, 0.875, 2.1, 2.7),
    "atan": Smooth(-8, 8, 1, 1.5),
    "sinh": Smooth(-4, 4, 28, 28),
    "cosh": Smooth(-4, 4, 28, 28),
    "tanh": Smooth(-8, 8, 1, 1),
    "asinh": Smooth(-8, 8, 1, 2.8),
    "acosh": Smooth(1.5, 8, 0.9, 2.8),
    "atanh": Smooth(-0.875, 0.875, 4.3, 1.4),
    "erf": Smooth(-4, 4, 1.2, 1),
    "erfc": Smooth(-4, 4, 1.2, 2),
    "erf_inv": Smooth(-0.875, 0.875, 3, 1.1),
    "lgamma": Smooth(0.5, 8, 2, 8.6),
}
# Of two operands: the domain of the second one, and both slopes.
SMOOTH_PAIRS = {
    "div": (Smooth(-8, 8, 4, 32), Smooth(0.25, 8, 128, 0)),
    "pow": (Smooth(0.25, 4, 128, 16), Smooth(-2, 2, 23, 0)),
    "atan2": (Smooth(-8, 8, 4, 1.6), Smooth(0.25, 8, 4, 0)),
}


def smooth(domains: tuple[Smooth, ...], operands: tuple[Fact, ...], dtype: DType) -> Fact | None:
    """The fact of a smooth function of operands in its domain."""
    bound = domains[0].bound
    error = sum(domain.slope * f.error for domain, f in zip(domains, operands, strict=True))
    error += _ULPS * roundoff(accumulator(dtype)) * bound
    return rounded(Fact(bound, FINEST, error), dtype)


def elementwise(function: str, operands: tuple[Fact, ...], dtype: DType) -> Fact | None:
    """The fact of the row `function` on operands of `dtype`, which are in the domain of a smooth function."""
    if function in JUMPS and any(f.error for f in operands):
        return None
    if function in (*COMPARISONS, "is_finite"):
        return Fact(1)
    return _of_floats(function, operands) if kind_of(dtype) == "float" else _of_integers(function, operands, dtype)


def arithmetic(function: str, operands: tuple[Fact, ...], dtype: DType) -> Fact | None:
    """The fact of a function that rounds."""
    x, y = operands
    inf = x.inf or y.inf
    if function != "mul":
        return rounded(Fact(x.bound + y.bound, min(x.grain, y.grain), x.error + y.error, inf), dtype)
    error = x.error * y.bound + y.error * x.bound + x.error * y.error
    # A product of 0 and inf is NaN; where rounding makes the 0 a tiny number on one backend, it is inf.
    if inf and error:
        return None
    return rounded(Fact(x.bound * y.bound, x.grain + y.grain, error, inf), dtype)


def _of_floats(function: str, operands: tuple[Fact, ...]) -> Fact | None:
    x = operands[0]
    match function:
        case "max" | "min":
            return union(*operands)
        case "neg" | "abs":
            return x
        case "sign":
            return Fact(1)
        case "floor" | "ceil" | "round_even" | "round_away":
            return replace(x, bound=float(int(x.bound) + 1), grain=max(0, x.grain))
        case "rem":
            return Fact(x.bound, min(f.grain for f in operands))
        case "nextafter":
            return Fact(2 * x.bound, FINEST, 0.0, x.inf)
        case _:
            raise NotImplementedError(function)


def _of_integers(function: str, operands: tuple[Fact, ...], dtype: DType) -> Fact:
    whole_range, bounds = whole(dtype), [f.bound for f in operands]
    match function:
        case "max" | "min":
            return Fact(max(bounds))
        case "add" | "sub" if kind_of(dtype) == "signed":
            return _unless_wrapped(sum(bounds), whole_range)
        case "mul":
            return _unless_wrapped(bounds[0] * bounds[1], whole_range)
        case _:
            return whole_range


def _unless_wrapped(bound: float, whole_range: Fact) -> Fact:
    return Fact(bound) if bound < whole_range.bound else whole_range


# --- other ops ------------------------------------------------------------------------------------------------------


def convert(x: Fact, source: DType, target: DType) -> Fact | None:
    """The fact of a cast."""
    floats = kind_of(source) == "float", kind_of(target) == "float"
    if target == BOOL:
        return None if x.error else Fact(1)
    if floats[1]:
        return rounded(x, target)
    if floats[0]:
        return None if x.error else Fact(limit(target) if x.inf else min(x.bound, limit(target)))
    wraps = kind_of(target) == "unsigned" and kind_of(source) == "signed"
    return whole(target) if wraps or x.bound >= limit(target) else x


def dot(x: Fact, y: Fact, length: int, dtype: DType, precision: Precision) -> Fact | None:
    """The fact of sums of `length` products."""
    if kind_of(dtype) != "float":
        return whole(I32)
    product = arithmetic("mul", tuple(_cheapened(f, dtype, precision) for f in (x, y)), accumulator(dtype))
    return product and _sum(product, length, accumulator(dtype))


def _cheapened(x: Fact, dtype: DType, precision: Precision) -> Fact:
    """A float32 operand that may be rounded to as few bits as `precision` allows."""
    bits = {"ieee": 24, "tf32": 11, "bf16": 8, "bf16x3": 16, "bf16x6": 24}[precision]
    if dtype != F32 or x.bound <= 2.0 ** max(bits + x.grain, -1000):
        return x
    return replace(x, grain=FINEST, error=x.error + x.bound * 2.0 ** (1 - bits))


def _sum(x: Fact, length: int, dtype: DType) -> Fact | None:
    """The fact of the sum of `length` numbers, in any order, rounded to `dtype` at each step."""
    total = Fact(max(length, 1) * x.bound, x.grain, length * x.error, x.inf)
    if not total.error and exact(total, dtype):
        return total
    return rounded(replace(total, error=total.error + length * roundoff(dtype) * total.bound), dtype)


def reduce(monoid: Monoid, x: Fact, length: int, dtype: DType) -> Fact | None:
    """The fact of a reduction of `length` elements of `dtype`."""
    if kind_of(dtype) != "float":
        return whole(dtype)
    if monoid in ("max", "min"):
        return None if not length else x
    if monoid == "sum":
        return rounded(_sum(x, length, accumulator(dtype)), dtype)
    power = Fact(max(1.0, x.bound) ** length, min(x.grain, 0) * max(length, 1), 0.0, x.inf)
    return rounded(power, dtype) if not x.error and exact(power, accumulator(dtype)) else None
