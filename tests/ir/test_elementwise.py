import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from jax import lax

from tests.ir.funcs import assert_near, assert_same, edges, evaluate, nearest
from tilekern.errors import VerifyError
from tilekern.ir.core import Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.types import BOOL, DTYPES, F32, I32, TileType, kind_of

CELLS = [(name, dtype) for name, row in TABLE.items() for dtype, d in DTYPES.items() if kind_of(d) in row.accepts]
INF, NAN = math.inf, math.nan


def guarded(function: Callable[..., float], poles: dict[float, float] | None = None) -> Callable[..., float]:
    """A function of `math` that gives infinities and NaN instead of raising."""

    def safe(*x: float) -> float:
        try:
            return function(*x)
        except ValueError:
            return (poles or {}).get(x[0], NAN)
        except OverflowError:
            return math.copysign(INF, x[0]) if function is math.sinh else INF

    return safe


def odd(y: float) -> bool:
    return math.isfinite(y) and y == int(y) and int(y) % 2 == 1


def power(x: float, y: float) -> float:
    negative = math.copysign(1, x) < 0 and odd(y)
    try:
        return math.pow(x, y)
    except OverflowError:
        return -INF if negative else INF
    except ValueError:
        return NAN if x != 0 else -INF if negative else INF


def divide(x: float, y: float) -> float:
    if y == 0:
        return NAN if x == 0 or x != x else math.copysign(INF, x) * math.copysign(1, y)
    return x / y


def extreme(choose: Callable[..., float]) -> Callable[[float, float], float]:
    return lambda x, y: NAN if x != x or y != y else choose(x, y)


def whole(function: Callable[[float], float]) -> Callable[[float], float]:
    """A rounding to integers; what is none, and the sign of zero, stay."""
    return lambda x: math.copysign(function(x), x) if math.isfinite(x) else x


def away(x: float) -> float:
    part, number = math.modf(x)
    return number + (math.copysign(1, x) if abs(part) >= 0.5 else 0)


# The rows that round exactly once, then those that may be off in the last place; on float64 numbers.
EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": divide,
    "rem": guarded(math.fmod),
    "max": extreme(max),
    "min": extreme(min),
    "neg": lambda x: -x,
    "abs": lambda x: math.copysign(x, 1),
    "sign": lambda x: x if x == 0 or x != x else math.copysign(1, x),
    "floor": whole(math.floor),
    "ceil": whole(math.ceil),
    "round_even": whole(round),
    "round_away": whole(away),
    "sqrt": guarded(math.sqrt),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "is_finite": math.isfinite,
}
NEAR: dict[str, Callable[..., float]] = {
    "pow": power,
    "atan2": math.atan2,
    "exp": guarded(math.exp),
    "exp2": guarded(math.exp2),
    "expm1": guarded(math.expm1),
    "log": guarded(math.log, {0.0: -INF}),
    "log2": guarded(math.log2, {0.0: -INF}),
    "log1p": guarded(math.log1p, {-1.0: -INF}),
    "rsqrt": lambda x: divide(1, guarded(math.sqrt)(x)),
    "cbrt": math.cbrt,
    "logistic": lambda x: 1 / (1 + guarded(math.exp)(-x)),
    "sin": guarded(math.sin),
    "cos": guarded(math.cos),
    "tan": guarded(math.tan),
    "asin": guarded(math.asin),
    "acos": guarded(math.acos),
    "atan": math.atan,
    "sinh": guarded(math.sinh),
    "cosh": guarded(math.cosh),
    "tanh": math.tanh,
    "asinh": math.asinh,
    "acosh": guarded(math.acosh),
    "atanh": guarded(math.atanh, {1.0: INF, -1.0: -INF}),
    "erf": math.erf,
    "erfc": math.erfc,
    "erf_inv": scipy.special.erfinv,
    "lgamma": scipy.special.gammaln,
}


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


# On Python integers; `bits` and the dtype's signedness come last.
INTEGER: dict[str, Callable[..., int]] = {
    "add": lambda x, y, *_: x + y,
    "sub": lambda x, y, *_: x - y,
    "mul": lambda x, y, *_: x * y,
    "div": lambda x, y, *_: truncated(x, y),
    "rem": lambda x, y, *_: x - y * truncated(x, y),
    "max": lambda x, y, *_: max(x, y),
    "min": lambda x, y, *_: min(x, y),
    "neg": lambda x, *_: -x,
    "abs": lambda x, *_: abs(x),
    "sign": lambda x, *_: (x > 0) - (x < 0),
    "and": lambda x, y, *_: x & y,
    "or": lambda x, y, *_: x | y,
    "xor": lambda x, y, *_: x ^ y,
    "not": lambda x, *_: ~x,
    "population_count": lambda x, bits: (x % 2**bits).bit_count(),
    "clz": lambda x, bits: bits - (x % 2**bits).bit_length(),
    "shift_left": lambda x, y, bits: x << y % 2**bits if y % 2**bits < bits else 0,
    "shift_right_logical": lambda x, y, bits: x % 2**bits >> y % 2**bits,
    "shift_right_arithmetic": lambda x, y, bits: wrapped(x, bits, signed=True) >> y % 2**bits,
    "eq": lambda x, y, *_: x == y,
    "ne": lambda x, y, *_: x != y,
    "lt": lambda x, y, *_: x < y,
    "le": lambda x, y, *_: x <= y,
    "gt": lambda x, y, *_: x > y,
    "ge": lambda x, y, *_: x >= y,
}


def wrapped(x: int, bits: int, signed: bool) -> int:
    x %= 2**bits
    return x - 2**bits if signed and x >= 2 ** (bits - 1) else x


def operands(name: str, dtype: np.dtype[Any]) -> tuple[np.ndarray, ...]:
    """Edge values, or all pairs of some of them."""
    if TABLE[name].arity == 1:
        return (edges(dtype),)
    one = edges(dtype, 24)
    some = np.concatenate([one[:40], one[40::7]])
    x, y = np.meshgrid(some, some)
    x, y = x.ravel(), y.ravel()
    defined = y != np.zeros((), dtype) if name in ("div", "rem") and dtype.kind in "iu" else np.full(x.shape, True)
    return x[defined], y[defined]


def stepped(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """One step of the bit pattern from x towards y."""
    unsigned = f"u{x.dtype.itemsize}"
    bits, smallest = x.view(unsigned), np.ones(x.shape, unsigned).view(x.dtype)
    with np.errstate(all="ignore"):
        away = (np.abs(x) < np.abs(y)) & (np.signbit(x) == np.signbit(y))
        step = np.where(away, bits + np.ones_like(bits), bits - np.ones_like(bits)).view(x.dtype)
        step = np.where(x == 0, np.where(np.signbit(y), -smallest, smallest), step)
        return np.where((x != x) | (y != y), np.asarray(np.nan, x.dtype), np.where(x == y, y, step))


def test_every_row_has_an_oracle() -> None:
    assert EXACT.keys() | NEAR.keys() | INTEGER.keys() | {"nextafter"} == TABLE.keys()


@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_meaning(name: str, dtype: str) -> None:
    xs = operands(name, DTYPES[dtype])
    got = evaluate(Elementwise, *xs, function=name)
    if name == "nextafter":
        assert_same(got, stepped(*xs), zeros=False)
    elif kind_of(DTYPES[dtype]) == "float":
        function = EXACT.get(name) or NEAR[name]
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wide = [x.astype(np.float64).tolist() for x in xs]
        expected = [function(*x) for x in zip(*wide, strict=True)]
        if got.dtype == BOOL:
            np.testing.assert_array_equal(got, expected)
        elif name in EXACT:
            assert_same(got, nearest(np.array(expected, np.float64), got.dtype), zeros=name not in ("max", "min"))
        else:
            assert_near(got, np.array(expected, np.float64), least=1 if name == "lgamma" else 0)
    else:
        bits, signed = 1 if dtype == "bool" else got.dtype.itemsize * 8, got.dtype.kind == "i"
        exact = [INTEGER[name](*map(int, x), xs[0].dtype.itemsize * 8) for x in zip(*xs, strict=True)]
        np.testing.assert_array_equal(got, [wrapped(x, bits if got.dtype != BOOL else 1, signed) for x in exact])


ROUNDING = {"round_even": (lax.RoundingMethod.TO_NEAREST_EVEN,), "round_away": (lax.RoundingMethod.AWAY_FROM_ZERO,)}


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, d in CELLS if d in ("f32", "i32", "u8", "bool")])
def test_the_meaning_is_that_of_jax(name: str, dtype: str) -> None:
    xs = operands(name, DTYPES[dtype])
    if dtype == "f32":
        # XLA takes subnormals for 0; its approximations lose digits of large arguments.
        keep = np.all([(np.abs(x) > 1e-30) & (np.abs(x) < 1e30) | (x == 0) | ~np.isfinite(x) for x in xs], axis=0)
        xs = tuple(x[keep] for x in xs)
    got = evaluate(Elementwise, *xs, function=name)
    function = getattr(lax, TABLE[name].lax)
    expected = np.asarray(jax.jit(lambda *x: function(*x, *ROUNDING.get(name, ())))(*xs))
    assert expected.dtype == got.dtype
    if dtype == "f32" and got.dtype == F32:
        eps = float(np.finfo(np.float32).eps)
        np.testing.assert_allclose(got, expected, rtol=256 * eps, atol=16 * eps)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u8", "u64"])
def test_integer_division_by_zero_does_not_trap(dtype: str) -> None:
    x = edges(DTYPES[dtype])
    for name in ("div", "rem"):
        assert evaluate(Elementwise, x, np.zeros_like(x), function=name).shape == x.shape


def test_any_shape_and_stride() -> None:
    x = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    for view in (x, x.T, x[::2, ::-1], np.broadcast_to(x[0], (5, 4)), x[:0], x[0, 0]):
        for name in ("abs", "population_count", "shift_left", "shift_right_logical", "div"):
            others = () if TABLE[name].arity == 1 else (np.full(view.shape, 2, np.int32),)
            got = evaluate(Elementwise, np.asarray(view), *others, function=name)
            flat = evaluate(Elementwise, np.array(view).ravel(), *(o.ravel() for o in others), function=name)
            np.testing.assert_array_equal(got, flat.reshape(view.shape))


def value(dtype: Any = F32, shape: tuple[int, ...] = (2,)) -> Value:
    return Value(TileType(shape, dtype))


@pytest.mark.parametrize(
    ("function", "operands", "message"),
    [
        ("plus", (value(),), "no elementwise op is named 'plus'"),
        ("add", (value(),), "add takes 2 operands, got 1"),
        ("add", (value(), value(I32)), r"add takes operands of one type, got f32\[2\], i32\[2\]"),
        ("add", (value(), value(shape=(1,))), r"add takes operands of one type, got f32\[2\], f32\[1\]"),
        ("add", (value(BOOL), value(BOOL)), r"add does not accept bool\[2\]"),
        ("exp", (value(I32),), r"exp does not accept i32\[2\]"),
        ("and", (value(), value()), r"and does not accept f32\[2\]"),
    ],
)
def test_type_rule(function: str, operands: tuple[Value, ...], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        Elementwise(operands=operands, function=function)
