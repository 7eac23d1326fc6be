import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import assert_same, edges, evaluate, nearest
from tilekern.errors import VerifyError
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select, identity, splat
from tilekern.ir.core import Op, Value
from tilekern.ir.types import BOOL, DTYPES, F16, F32, F64, I32, TileType, accumulator, kind_of

every_dtype = pytest.mark.parametrize("name", DTYPES)
NUMBERS = [n for n in DTYPES if n != "bool"]
FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]


def value(shape: tuple[int, ...] = (2,), dtype: Any = F32) -> Value:
    return Value(TileType(shape, dtype))


def rejected(message: str, kind: type[Op], *operands: Value, **fields: Any) -> None:
    with pytest.raises(VerifyError, match=message):
        kind(operands=operands, **fields)


# --- constant, select ------------------------------------------------------------------------------------------------


@every_dtype
def test_constant(name: str) -> None:
    array = edges(DTYPES[name])[:6].reshape(-1, 2)
    assert_same(evaluate(Constant, array=array, shape=array.shape), array)
    one = splat(array[0, 0], TileType((2, 3), DTYPES[name]))
    assert one.array.shape == () and one.hint == "" and splat(1, TileType((), F32), hint="x").hint == "x"
    assert_same(np.asarray(one.evaluate()), np.full((2, 3), array[0, 0]))


@every_dtype
def test_select(name: str) -> None:
    x = edges(DTYPES[name])
    y, which = x[::-1], np.arange(len(x)) % 3 == 0
    got = evaluate(Select, which, x, y)
    assert_same(got[which], x[which])
    assert_same(got[~which], y[~which])


# --- convert ---------------------------------------------------------------------------------------------------------


def converted(x: Any, dtype: np.dtype[Any]) -> Any:
    """One number, as an integer or a bool, on Python integers."""
    if dtype == BOOL:
        return x != 0
    limits = np.iinfo(dtype)
    if isinstance(x, float):
        return (
            0
            if x != x
            else max(limits.min, min(limits.max, int(x) if math.isfinite(x) else int(math.copysign(2**99, x))))
        )
    return (x - limits.min) % (limits.max - limits.min + 1) + limits.min


@every_dtype
@pytest.mark.parametrize("target", DTYPES)
def test_convert(name: str, target: str) -> None:
    x, dtype = edges(DTYPES[name]), DTYPES[target]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        got = evaluate(Convert, x, dtype=dtype)
        wide = x.astype(np.float64)
    if kind_of(dtype) == "float":
        exact = np.abs(wide) <= 2**53 if x.dtype.kind in "iu" else np.full(x.shape, True)
        assert_same(got[exact], nearest(wide[exact], dtype))
    else:
        numbers = wide.tolist() if kind_of(x.dtype) == "float" else list(map(int, x))
        np.testing.assert_array_equal(got, [converted(v, dtype) for v in numbers])


@pytest.mark.parametrize(
    ("name", "target", "power"),
    [("f64", "bf16", 0), ("f64", "f8e4m3fn", 0), ("f64", "f8e5m2", 0), ("i64", "bf16", 40), ("i32", "bf16", 30)],
)
def test_convert_rounds_once(name: str, target: str, power: int) -> None:
    """A number just above a tie, which float32 takes for the tie."""
    fraction = ml_dtypes.finfo(DTYPES[target]).nmant
    for sign in (1, -1):
        x = sign * (2.0**power + 2.0 ** (power - fraction - 1) + 2.0 ** (power - 30))
        got = evaluate(Convert, np.asarray(x, DTYPES[name]), dtype=DTYPES[target])
        assert float(got) == sign * (2.0**power + 2.0 ** (power - fraction))


# --- bitcast ---------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("target", DTYPES)
def test_bitcast(name: str, target: str) -> None:
    x, dtype = edges(DTYPES[name])[:64].reshape(-1, 2), DTYPES[target]
    if BOOL in (x.dtype, dtype) or x.dtype.itemsize != dtype.itemsize:
        rejected("bitcast of", Bitcast, value(x.shape, x.dtype), dtype=dtype)
    else:
        for view in (x, x.T):
            got = evaluate(Bitcast, view, dtype=dtype)
            assert got.tobytes() == view.tobytes()


# --- dot -------------------------------------------------------------------------------------------------------------


@st.composite
def dots(draw: Any) -> tuple[tuple[tuple[int, ...], ...], dict[str, Any], str]:
    """Shapes of the operands, dimension numbers, and the einsum that they stand for."""
    count = st.integers(0, 2)
    batch, contract, free = draw(count), draw(count), (draw(count), draw(count))
    letters = "abcdefgh"
    size = {letter: draw(st.integers(0, 3)) for letter in letters}
    shared = letters[:batch], letters[batch : batch + contract]
    own = letters[batch + contract : batch + contract + free[0]], letters[batch + contract + free[0] :][: free[1]]
    sides = ["".join(draw(st.permutations([*shared[0], *shared[1], *mine]))) for mine in own]
    numbers = [tuple(tuple(side.index(x) for x in group) for side in sides) for group in shared]
    # What is free stands in the order of the operand.
    kept = ["".join(x for x in side if x not in shared[0] + shared[1]) for side in sides]
    shapes = tuple(tuple(size[x] for x in side) for side in sides)
    fields = {"batch": numbers[0], "contract": numbers[1]}
    return shapes, fields, f"{sides[0]},{sides[1]}->{shared[0]}{kept[0]}{kept[1]}"


@given(dots(), st.sampled_from(NUMBERS), st.integers(0, 999))
def test_dot(case: Any, name: str, seed: int) -> None:
    shapes, fields, einsum = case
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    low = 0 if kind_of(dtype) == "unsigned" else -4
    wide = [rng.integers(low, 5, shape).astype(np.float64) for shape in shapes]
    got = evaluate(Dot, *(x.astype(dtype) for x in wide), **fields)
    # Products and sums of small integers are exact in every accumulator.
    assert_same(got, np.asarray(np.einsum(einsum, *wide)).astype(accumulator(dtype)), zeros=False)


@pytest.mark.parametrize(
    ("name", "result"), [("f64", F64), ("f32", F32), ("bf16", F32), ("f8e4m3fn", F32), ("i8", I32)]
)
def test_dot_accumulates_in_the_wide_dtype(name: str, result: Any) -> None:
    x = np.full((1, 1000), 7, DTYPES[name])
    got = evaluate(Dot, x, x, contract=((1,), (1,)))
    assert got.dtype == result and got[0, 0] == 49000


def test_integer_dot_wraps() -> None:
    x = np.full(4, 2**31 - 1, np.int32)
    assert evaluate(Dot, x, x, contract=((0,), (0,))) == 4


def fraction_of(x: np.ndarray, bits: int) -> np.ndarray:
    """float32 rounded to `bits` of significand, ties to even; the exponent is that of float32."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=8))
def test_precision_rounds_the_operands(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    with np.errstate(all="ignore"):
        expected = {"ieee": x, "bf16": nearest(x.astype(np.float64), DTYPES["bf16"]), "tf32": fraction_of(x, 11)}
        expected |= {"bf16x3": x, "bf16x6": x}
        for precision, rounded in expected.items():
            got = evaluate(Dot, x, np.ones(1, np.float32), contract=((), ()), precision=precision)
            assert_same(got[:, 0], rounded.astype(np.float32), zeros=False)
            got = evaluate(Dot, np.ones(1, np.float32), x, contract=((), ()), precision=precision)
            assert_same(got[0], rounded.astype(np.float32), zeros=False)


def test_precision_leaves_other_dtypes_alone() -> None:
    x = np.array([1 + 2**-10], np.float16)
    assert evaluate(Dot, x, np.ones(1, F16), contract=((0,), (0,)), precision="bf16") == 1 + 2**-10


def test_dot_type_rule() -> None:
    x, y = value((2, 3)), value((3, 4))
    rejected("dot takes 2 operands, got 1", Dot, x, contract=((1,), (0,)))
    rejected("operands of one dtype", Dot, x, value((3, 4), I32), contract=((1,), (0,)))
    rejected("pairs dims", Dot, x, y, contract=((0,), (0,)))
    rejected("pairs dims", Dot, x, y, contract=((1,), ()))
    rejected("not different dims", Dot, x, y, contract=((2,), (0,)))
    rejected("not different dims", Dot, x, y, contract=((-1,), (0,)))
    rejected("not different dims", Dot, value((3, 3)), value((3, 3)), contract=((0, 0), (0, 1)))
    rejected("not different dims", Dot, value((3, 3)), value((3, 3)), contract=((0,), (0,)), batch=((0,), (1,)))
    rejected("precision 'fast'", Dot, x, y, contract=((1,), (0,)), precision="fast")


# --- reduce ----------------------------------------------------------------------------------------------------------

PYTHON: dict[str, Any] = {
    "sum": lambda x, y: x + y,
    "prod": lambda x, y: x * y,
    "max": max,
    "min": min,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}


def accepts(monoid: str, dtype: Any) -> bool:
    kind = kind_of(dtype)
    return kind != "float" if monoid in ("and", "or", "xor") else kind != "bool" or monoid in ("max", "min")


CELLS = [(m, n) for m in PYTHON for n, d in DTYPES.items() if accepts(m, d)]


@given(
    st.sampled_from(CELLS),
    st.lists(st.integers(0, 3), max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)), st.sets(st.sampled_from(range(len(shape)))) if shape else st.just(())
        )
    ),
    st.integers(0, 999),
)
def test_reduce(cell: tuple[str, str], shape_dims: Any, seed: int) -> None:
    (monoid, name), (shape, dims) = cell, shape_dims
    dtype = DTYPES[name]
    low = 0 if kind_of(dtype) in ("unsigned", "bool") else -2
    high = 2 if dtype == BOOL else 3
    x = np.random.default_rng(seed).integers(low, high, shape).astype(dtype)
    got = evaluate(Reduce, x, monoid=monoid, dims=tuple(dims))
    expected = np.full([n for d, n in enumerate(shape) if d not in dims], identity(monoid, dtype).astype(object))  # pyright: ignore[reportArgumentType]
    expected = expected.astype(object)
    for index in np.ndindex(*shape):
        kept = tuple(i for d, i in enumerate(index) if d not in dims)
        expected[kept] = PYTHON[monoid](expected[kept], x[index].astype(object))
    if dtype.kind in "iu":  # a product of 27 twos
        expected = np.array([converted(int(v), dtype) for v in expected.ravel()], dtype).reshape(expected.shape)
        np.testing.assert_array_equal(got, expected)
    elif dtype == BOOL:
        np.testing.assert_array_equal(got, expected.astype(bool))
    else:
        assert_same(got, nearest(expected.astype(np.float64), dtype), zeros=False)


@pytest.mark.parametrize(("monoid", "name"), CELLS)
def test_identity_changes_nothing(monoid: str, name: str) -> None:
    x = edges(DTYPES[name])
    one = identity(monoid, DTYPES[name])  # pyright: ignore[reportArgumentType]
    assert one.dtype == x.dtype and one.shape == ()
    pairs = np.stack([np.full(x.shape, one), x])
    infinite = (x != x) | ~np.isfinite(x.astype(np.float64)) if name == "f8e4m3fn" else x != x
    with np.errstate(invalid="ignore"):
        assert_same(evaluate(Reduce, pairs, monoid=monoid, dims=(0,))[~infinite], x[~infinite], zeros=False)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min"])
def test_nan_wins(monoid: str, name: str) -> None:
    x = np.array([1, np.nan, 2, 0], DTYPES[name])
    assert np.isnan(evaluate(Reduce, x, monoid=monoid, dims=(0,)))


@pytest.mark.parametrize(("name", "many", "expected"), [("f16", 5000, 5000), ("bf16", 1024, 1024), ("f8e5m2", 64, 64)])
def test_narrow_sums_accumulate_in_float32(name: str, many: int, expected: float) -> None:
    assert float(evaluate(Reduce, np.ones(many, DTYPES[name]), monoid="sum", dims=(0,))) == expected


def test_reduce_and_other_type_rules() -> None:
    rejected("reduce takes 1 operands, got 2", Reduce, value(), value(), monoid="sum", dims=(0,))
    rejected("no reduction is named 'mean'", Reduce, value(), monoid="mean", dims=(0,))
    rejected("not different dims", Reduce, value(), monoid="sum", dims=(1,))
    rejected("not different dims", Reduce, value((2, 2)), monoid="sum", dims=(0, 0))
    rejected("reduce and does not accept", Reduce, value(), monoid="and", dims=(0,))
    rejected("reduce sum does not accept", Reduce, value(dtype=BOOL), monoid="sum", dims=(0,))
    rejected("constant takes no operand", Constant, value(), array=np.zeros(2), shape=(2,))
    rejected("from an array of shape", Constant, array=np.zeros(2), shape=(2, 2))
    rejected("select takes 3 operands", Select, value(), value())
    rejected("bool predicate", Select, value(), value(), value())
    rejected("two tiles of one type", Select, value(dtype=BOOL), value(), value(dtype=I32))
    rejected("select by", Select, value((3,), BOOL), value(), value())
    rejected("convert takes 1 operands, got 0", Convert, dtype=F32)
