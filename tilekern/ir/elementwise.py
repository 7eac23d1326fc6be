"""The elementwise ops: one table, one row an op.

A row says everything about its op: the number of operands, the kinds of dtype that they may have, the result's dtype,
the meaning on NumPy arrays, and the name of the function in `jax.lax`. By this name the tracer recognises the op, and
the XLA backend emits it. Operands have equal shapes and, in every row, equal dtypes. Casts and selects have no row: see
`Convert` and `Select`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from tilekern.errors import VerifyError
from tilekern.ir.core import Array, Op
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, F64, DType, Kind, TileType, kind_of, round_to


@record
class Row:
    """One elementwise op.

    Attributes:
      name: the name of the op, and of the JAX primitive that it is imported from.
      arity: the number of operands.
      accepts: the kinds of dtype the operands may have.
      result: "same" dtype as the operands, or "bool".
      meaning: the op on NumPy arrays.
      lax: the function of `jax.lax` that computes it.
    """

    name: str
    arity: int
    accepts: tuple[Kind, ...]
    result: Literal["same", "bool"]
    meaning: Callable[..., Any]
    lax: str


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` computed in float64 and rounded once to the operands' dtype."""

    def rounded(*operands: Array) -> Any:
        return round_to(np.asarray(function(*(x.astype(F64) for x in operands))), operands[0].dtype)

    return rounded


def _scalar(function: Callable[[float], float]) -> Callable[..., Any]:
    """`function` of one float, applied to every element of an array."""
    return _wide(np.vectorize(function, otypes=[np.float64]))


def _divide(x: Array, y: Array) -> Any:
    """Division; integers round toward zero (and by zero: unspecified, never a trap)."""
    if kind_of(x.dtype) == "float":
        return x / y
    y = np.where(y == 0, np.ones_like(y), y)
    quotient = x // y
    return (quotient + ((x % y != 0) & ((x < 0) != (y < 0)))).astype(x.dtype)


def _remainder(x: Array, y: Array) -> Any:
    """The remainder with the dividend's sign."""
    if kind_of(x.dtype) == "float":
        return np.fmod(x, y)
    return np.fmod(x, np.where(y == 0, np.ones_like(y), y))


def _sign(x: Array) -> Any:
    """-1, 0 or 1; zeros keep their sign."""
    return np.where(x == 0, x, np.sign(x))


def _rsqrt(x: Array) -> Any:
    return 1.0 / np.sqrt(x)


def _logistic(x: Array) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _round_away(x: Array) -> Any:
    """Round to the nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return np.copysign(whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0.0), x)


def _erf_inv(x: float) -> float:
    """Inverse error function: Newton's method on `erf`, from Winitzki's approximation (2008), eq. 7."""
    if not -1.0 < x < 1.0:
        return math.copysign(math.inf, x) if abs(x) == 1.0 else math.nan
    log, a = math.log1p(-x * x), 0.147
    half = 2 / (math.pi * a) + log / 2
    y = math.copysign(math.sqrt(max(0.0, math.sqrt(half * half - log / a) - half)), x)
    for _ in range(4):
        # Newton on erfc where erf is flat, so that the tail keeps its digits.
        error = math.erf(y) - x if abs(x) < 0.5 else math.copysign(1, x) * ((1 - abs(x)) - math.erfc(abs(y)))
        y -= error * math.sqrt(math.pi) / 2 * math.exp(min(y * y, 700.0))
    return y


def _lgamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):  # at a pole, and beyond the largest float
        return math.inf


def _population_count(x: Array) -> Any:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)


def _leading_zeros(x: Array) -> Any:
    """The number of zero bits above the highest set bit. That bit is first copied to all bits below it."""
    size = x.dtype.itemsize
    bits = x.view(f"u{size}")
    for power in range((8 * size).bit_length() - 1):
        bits = bits | bits >> np.asarray(1 << power, bits.dtype)
    return (8 * size - np.bitwise_count(bits)).astype(x.dtype)


def _shift(function: Callable[..., Any], view: Literal["i", "u"]) -> Callable[..., Any]:
    """A shift of the bits as signed or unsigned numbers; a shift by the width or more shifts all bits out."""

    def shifted(x: Array, y: Array) -> Any:
        bits = x.dtype.itemsize * 8
        amount = y.view(f"u{y.dtype.itemsize}")
        number = x.view(f"{view}{x.dtype.itemsize}")
        inside = function(number, np.minimum(amount, bits - 1).astype(number.dtype)).view(x.dtype)
        # An arithmetic shift by the width or more leaves copies of the sign, as does a shift by bits - 1.
        return np.where((amount < bits) | (view == "i"), inside, np.zeros_like(x))

    return shifted


_FLOAT: tuple[Kind, ...] = ("float",)
_SIGNED: tuple[Kind, ...] = ("float", "signed")
_NUMBER: tuple[Kind, ...] = ("float", "signed", "unsigned")
_INTEGER: tuple[Kind, ...] = ("signed", "unsigned")
_BITS: tuple[Kind, ...] = ("signed", "unsigned", "bool")
_ANY: tuple[Kind, ...] = ("float", "signed", "unsigned", "bool")

_Entry = tuple[str, int, tuple[Kind, ...], Callable[..., Any]]

# name, arity, accepted kinds, meaning; the jax.lax function has the same name unless _LAX says otherwise.
_SAME: tuple[_Entry, ...] = (
    ("add", 2, _NUMBER, np.add),
    ("sub", 2, _NUMBER, np.subtract),
    ("mul", 2, _NUMBER, np.multiply),
    ("div", 2, _NUMBER, _divide),
    ("rem", 2, _NUMBER, _remainder),
    ("max", 2, _ANY, np.maximum),
    ("min", 2, _ANY, np.minimum),
    ("pow", 2, _FLOAT, _wide(np.power)),
    ("atan2", 2, _FLOAT, _wide(np.arctan2)),
    ("nextafter", 2, _FLOAT, np.nextafter),
    ("neg", 1, _NUMBER, np.negative),
    ("abs", 1, _SIGNED, np.abs),
    ("sign", 1, _NUMBER, _sign),
    ("floor", 1, _FLOAT, np.floor),
    ("ceil", 1, _FLOAT, np.ceil),
    ("round_even", 1, _FLOAT, np.rint),
    ("round_away", 1, _FLOAT, _wide(_round_away)),
    ("exp", 1, _FLOAT, _wide(np.exp)),
    ("exp2", 1, _FLOAT, _wide(np.exp2)),
    ("expm1", 1, _FLOAT, _wide(np.expm1)),
    ("log", 1, _FLOAT, _wide(np.log)),
    ("log2", 1, _FLOAT, _wide(np.log2)),
    ("log1p", 1, _FLOAT, _wide(np.log1p)),
    ("sqrt", 1, _FLOAT, _wide(np.sqrt)),
    ("rsqrt", 1, _FLOAT, _wide(_rsqrt)),
    ("cbrt", 1, _FLOAT, _wide(np.cbrt)),
    ("logistic", 1, _FLOAT, _wide(_logistic)),
    ("sin", 1, _FLOAT, _wide(np.sin)),
    ("cos", 1, _FLOAT, _wide(np.cos)),
    ("tan", 1, _FLOAT, _wide(np.tan)),
    ("asin", 1, _FLOAT, _wide(np.arcsin)),
    ("acos", 1, _FLOAT, _wide(np.arccos)),
    ("atan", 1, _FLOAT, _wide(np.arctan)),
    ("sinh", 1, _FLOAT, _wide(np.sinh)),
    ("cosh", 1, _FLOAT, _wide(np.cosh)),
    ("tanh", 1, _FLOAT, _wide(np.tanh)),
    ("asinh", 1, _FLOAT, _wide(np.arcsinh)),
    ("acosh", 1, _FLOAT, _wide(np.arccosh)),
    ("atanh", 1, _FLOAT, _wide(np.arctanh)),
    ("erf", 1, _FLOAT, _scalar(math.erf)),
    ("erfc", 1, _FLOAT, _scalar(math.erfc)),
    ("erf_inv", 1, _FLOAT, _scalar(_erf_inv)),
    ("lgamma", 1, _FLOAT, _scalar(_lgamma)),
    ("and", 2, _BITS, np.bitwise_and),
    ("or", 2, _BITS, np.bitwise_or),
    ("xor", 2, _BITS, np.bitwise_xor),
    ("not", 1, _BITS, np.invert),
    ("population_count", 1, _INTEGER, _population_count),
    ("clz", 1, _INTEGER, _leading_zeros),
    ("shift_left", 2, _INTEGER, _shift(np.left_shift, "u")),
    ("shift_right_logical", 2, _INTEGER, _shift(np.right_shift, "u")),
    ("shift_right_arithmetic", 2, _INTEGER, _shift(np.right_shift, "i")),
)
_TO_BOOL: tuple[_Entry, ...] = (
    ("eq", 2, _ANY, np.equal),
    ("ne", 2, _ANY, np.not_equal),
    ("lt", 2, _ANY, np.less),
    ("le", 2, _ANY, np.less_equal),
    ("gt", 2, _ANY, np.greater),
    ("ge", 2, _ANY, np.greater_equal),
    ("is_finite", 1, _FLOAT, np.isfinite),
)
_LAX = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "round_even": "round",
    "round_away": "round",
}


def _rows(entries: tuple[_Entry, ...], result: Literal["same", "bool"]) -> dict[str, Row]:
    return {
        name: Row(name, arity, accepts, result, meaning, _LAX.get(name, name))
        for name, arity, accepts, meaning in entries
    }


TABLE: dict[str, Row] = _rows(_SAME, "same") | _rows(_TO_BOOL, "bool")


@record(eq=False, kw_only=True)
class Elementwise(Op):
    """Apply the row `function` of the table to operands of equal shape and dtype."""

    name: ClassVar[str] = "elementwise"

    function: str

    @property
    def row(self) -> Row:
        """The table's row."""
        return TABLE[self.function]

    def infer(self) -> tuple[TileType, ...]:
        # Most ops are elementwise: their messages are formatted only where a check fails.
        row, tiles = TABLE.get(self.function), self.tiles()
        if row is None:
            raise VerifyError(f"no elementwise op is named {self.function!r}")
        if len(tiles) != row.arity:
            raise VerifyError(f"{self.function} takes {row.arity} operands, got {len(tiles)}")
        tile = tiles[0]
        if not all(t is tile or t == tile for t in tiles):
            raise VerifyError(f"{self.function} takes operands of one type, got {show(tiles)}")
        if kind_of(tile.dtype) not in row.accepts:
            raise VerifyError(f"{self.function} does not accept {tile}")
        return (tile if row.result == "same" else TileType(tile.shape, result_dtype(row, tile.dtype)),)

    def evaluate(self, *operands: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(self.row.meaning(*operands), self.result.tile.dtype)


def result_dtype(row: Row, dtype: DType) -> DType:
    """The dtype of the result of `row` on operands of `dtype`."""
    return BOOL if row.result == "bool" else dtype


def show(tiles: tuple[TileType, ...]) -> str:
    """Types in an error message."""
    return ", ".join(map(str, tiles))
