import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.ir.funcs import assert_near, assert_same, edges, evaluate
from tilekern.errors import VerifyError
from tilekern.ir.core import Op, Value
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.types import BOOL, DTYPES, F32, I32, TileType, kind_of

every_dtype = pytest.mark.parametrize("name", DTYPES)
FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]
SEEDS = st.integers(0, 999)


@st.composite
def shapes(draw: Any, least: int = 0) -> tuple[tuple[int, ...], int]:
    """A shape, and one of its dims, which has at least `least` elements."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] += least
    return tuple(shape), dim


def picked(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Some edge values of a dtype, several times each; NaN is often among them."""
    rng, values = np.random.default_rng(seed), edges(DTYPES[name], 32)
    few = rng.choice(np.append(values, values[-1:]), 5)
    if kind_of(DTYPES[name]) == "float":
        few[rng.integers(5)] = rng.choice([np.nan, 0.0, -0.0, np.inf])
    return rng.choice(few, shape)


def lines(x: np.ndarray, dim: int) -> Any:
    """Each line of `x` along `dim` as Python numbers, with the index of its other dims."""
    moved = np.moveaxis(x, dim, -1)
    exact = moved.astype(np.float64) if kind_of(x.dtype) == "float" else moved
    return ((index, exact[index].tolist()) for index in np.ndindex(*moved.shape[:-1]))


def value(shape: tuple[int, ...] = (2,), dtype: Any = F32) -> Value:
    return Value(TileType(shape, dtype))


def rejected(message: str, kind: type[Op], *operands: Value, **fields: Any) -> None:
    with pytest.raises(VerifyError, match=message):
        kind(operands=operands, **fields)


# --- arg-reduce ------------------------------------------------------------------------------------------------------


def extreme_place(line: list[Any], extreme: Callable[..., Any]) -> int:
    """The first NaN, or the first of the extreme elements."""
    broken = [i for i, x in enumerate(line) if x != x]
    return broken[0] if broken else line.index(extreme(line))


@every_dtype
@given(shapes(least=1), SEEDS)
def test_arg_reduce(name: str, shape_dim: Any, seed: int) -> None:
    shape, dim = shape_dim
    x = picked(name, shape, seed)
    for extreme in ("max", "min"):
        got = evaluate(ArgReduce, x, extreme=extreme, dim=dim)
        for index, line in lines(x, dim):
            assert got[index] == extreme_place(line, {"max": max, "min": min}[extreme])


# --- scan ------------------------------------------------------------------------------------------------------------

NAN_WINS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "prod": lambda x, y: x * y,
    "max": lambda x, y: math.nan if x != x or y != y else max(x, y),
    "min": lambda x, y: math.nan if x != x or y != y else min(x, y),
}


def running(line: list[Any], combine: Callable[[Any, Any], Any], reverse: bool) -> list[Any]:
    found: list[Any] = []
    for x in reversed(line) if reverse else line:
        found.append(combine(found[-1], x) if found else x)
    return found[::-1] if reverse else found


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
@given(shapes(), st.sampled_from(list(NAN_WINS)), st.booleans(), SEEDS)
def test_scan(name: str, shape_dim: Any, monoid: str, reverse: bool, seed: int) -> None:
    shape, dim = shape_dim
    dtype = DTYPES[name]
    low = 0 if kind_of(dtype) == "unsigned" else -2
    exact = monoid in ("sum", "prod")
    x = np.random.default_rng(seed).integers(low, 3, shape).astype(dtype) if exact else picked(name, shape, seed)
    got = np.moveaxis(evaluate(Scan, x, monoid=monoid, dim=dim, reverse=reverse), dim, -1)
    for index, line in lines(x, dim):
        assert_same(got[index], np.array(running(line, NAN_WINS[monoid], reverse), dtype), zeros=False)


@pytest.mark.parametrize("name", ["i8", "u8"])
def test_integer_scans_wrap(name: str) -> None:
    x = np.full(4, 100, DTYPES[name])
    np.testing.assert_array_equal(evaluate(Scan, x, monoid="sum", dim=0).astype(np.uint8), [100, 200, 44, 144])


@pytest.mark.parametrize(("name", "many"), [("f16", 5000), ("bf16", 1024), ("f8e5m2", 64)])
def test_narrow_scans_accumulate_in_float32(name: str, many: int) -> None:
    assert float(evaluate(Scan, np.ones(many, DTYPES[name]), monoid="sum", dim=0)[-1]) == many


@pytest.mark.parametrize("name", ["f32", "f64"])
@given(shapes(), st.booleans(), SEEDS)
def test_linear_scan(name: str, shape_dim: Any, reverse: bool, seed: int) -> None:
    shape, dim = shape_dim
    factors, terms = np.random.default_rng(seed).integers(-2, 3, (2, *shape)).astype(DTYPES[name])
    got = np.moveaxis(evaluate(LinearScan, factors, terms, dim=dim, reverse=reverse), dim, -1)
    for (index, line), (_, added) in zip(lines(factors, dim), lines(terms, dim), strict=True):
        state, found = 0.0, list[float]()
        for a, b in list(zip(line, added, strict=True))[:: -1 if reverse else 1]:
            state = a * state + b
            found.append(state)
        assert_same(got[index], np.array(found[:: -1 if reverse else 1], DTYPES[name]), zeros=False)


def log_sum_exp(line: list[float]) -> float:
    top = max(line, key=lambda x: math.inf if x != x else x, default=-math.inf)
    if math.isinf(top) or math.isnan(top):
        return math.nan if any(x != x for x in line) else top
    return top + math.log(math.fsum(math.exp(x - top) for x in line))


@pytest.mark.parametrize("name", FLOATS)
@given(shapes(), st.booleans(), SEEDS)
def test_logsumexp(name: str, shape_dim: Any, reverse: bool, seed: int) -> None:
    shape, dim = shape_dim
    rng = np.random.default_rng(seed)
    x = rng.choice([*rng.standard_normal(6) * 8, np.inf, -np.inf, np.nan][rng.integers(4) :], shape).astype(
        DTYPES[name]
    )
    got = np.moveaxis(evaluate(Scan, x, monoid="logsumexp", dim=dim, reverse=reverse), dim, -1)
    for index, line in lines(x, dim):
        seen = [line[i:] if reverse else line[: i + 1] for i in range(len(line))]
        # float32 sums of numbers near 1 are taken before the logarithm.
        assert_near(got[index], np.array([log_sum_exp(part) for part in seen], np.float64), least=8)


# --- sort ------------------------------------------------------------------------------------------------------------


@st.composite
def sorts(draw: Any) -> tuple[list[np.ndarray], int, int]:
    """Operands of one shape, the dim to sort along, and the number of keys."""
    shape, dim = draw(shapes())
    names = draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=3))
    seed = draw(SEEDS)
    return [picked(n, shape, seed + i) for i, n in enumerate(names)], dim, draw(st.integers(1, len(names)))


@given(sorts())
def test_sort(case: Any) -> None:
    operands, dim, num_keys = case
    for pick, x in enumerate(operands):
        got = np.moveaxis(evaluate(Sort, *operands, dim=dim, num_keys=num_keys, pick=pick), dim, -1)
        moved = np.moveaxis(x, dim, -1)
        columns = [dict(lines(key, dim)) for key in operands[:num_keys]]
        for index in np.ndindex(*moved.shape[:-1]):
            keys = list(zip(*(column[index] for column in columns), strict=True))
            order = sorted(range(len(keys)), key=lambda i: [(k != k, 0 if k != k else k) for k in keys[i]])
            assert got[index].tobytes() == moved[index][order].tobytes()


# --- top-k -----------------------------------------------------------------------------------------------------------


@every_dtype
@given(shapes(), SEEDS)
def test_top_k(name: str, shape_dim: Any, seed: int) -> None:
    shape, dim = shape_dim
    x, k = picked(name, shape, seed), seed % (shape[dim] + 1)
    got = np.moveaxis(evaluate(TopK, x, dim=dim, k=k), dim, -1)
    for index, line in lines(x, dim):
        order = sorted(range(len(line)), key=lambda i: (line[i] == line[i], 0 if line[i] != line[i] else -line[i]))
        np.testing.assert_array_equal(got[index], order[:k])


# --- the meaning is JAX's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "bf16", "i32", "u8"])
def test_the_meaning_is_that_of_jax(name: str) -> None:
    x, other = picked(name, (5, 40), 1), picked("i32", (5, 40), 2)
    for extreme, find in (("max", lax.argmax), ("min", lax.argmin)):
        assert_same(evaluate(ArgReduce, x, extreme=extreme, dim=1), np.asarray(find(x, 1, np.int32)))
    for monoid, run in (("max", lax.cummax), ("min", lax.cummin)):
        expected = np.asarray(run(x, axis=1, reverse=True))
        assert_same(evaluate(Scan, x, monoid=monoid, dim=1, reverse=True), expected, zeros=False)
    for num_keys in (1, 2):
        expected = jax.jit(lambda *x: lax.sort(x, dimension=1, num_keys=num_keys))(x, other)  # noqa: B023
        for pick in range(2):
            got = evaluate(Sort, x, other, dim=1, num_keys=num_keys, pick=pick)
            assert_same(got, np.asarray(expected[pick]), zeros=False)


# --- type rules ------------------------------------------------------------------------------------------------------


def test_type_rules() -> None:
    rejected("arg_reduce takes 1 operands, got 2", ArgReduce, value(), value(), extreme="max", dim=0)
    rejected("no arg_reduce is named 'sum'", ArgReduce, value(), extreme="sum", dim=0)
    rejected("not different dims", ArgReduce, value(), extreme="max", dim=1)
    rejected("not different dims", ArgReduce, value(), extreme="max", dim=-1)
    rejected("has no element", ArgReduce, value((2, 0)), extreme="max", dim=1)
    rejected("scan takes 1 operands, got 0", Scan, monoid="sum", dim=0)
    rejected("no scan is named 'mean'", Scan, value(), monoid="mean", dim=0)
    rejected("not different dims", Scan, value(), monoid="sum", dim=1)
    rejected(r"scan sum does not accept bool\[2\]", Scan, value(dtype=BOOL), monoid="sum", dim=0)
    rejected(r"scan logsumexp does not accept i32\[2\]", Scan, value(dtype=I32), monoid="logsumexp", dim=0)
    rejected("linear_scan takes 2 operands, got 1", LinearScan, value(), dim=0)
    rejected(r"one type, got f32\[2\], f32\[3\]", LinearScan, value(), value((3,)), dim=0)
    rejected(r"one type, got f32\[2\], i32\[2\]", LinearScan, value(), value(dtype=I32), dim=0)
    rejected(r"linear_scan does not accept i32\[2\]", LinearScan, value(dtype=I32), value(dtype=I32), dim=0)
    rejected("not different dims", LinearScan, value(), value(), dim=1)
    rejected("sort of 0 operands by 1 keys", Sort, dim=0)
    rejected("sort of 1 operands by 0 keys", Sort, value(), dim=0, num_keys=0)
    rejected("sort of 1 operands by 2 keys", Sort, value(), dim=0, num_keys=2)
    rejected("sort of 1 operands for number 1", Sort, value(), dim=0, pick=1)
    rejected(r"one shape, got f32\[2\], f32\[3\]", Sort, value(), value((3,)), dim=0)
    rejected("not different dims", Sort, value(), dim=1)
    rejected("top_k takes 1 operands, got 0", TopK, dim=0, k=1)
    rejected("not different dims", TopK, value(), dim=1, k=1)
    rejected(r"top_k of 3 elements along dim 0 of f32\[2\]", TopK, value(), dim=0, k=3)
    rejected("top_k of -1 elements", TopK, value(), dim=0, k=-1)
