"""Dtypes and functions: the same numbers by what Triton has."""

from __future__ import annotations

from itertools import permutations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import Source, assert_near, edges
from tests.lower.triton.legalize.meaning import SM_90, assert_keeps, expanded_for, hardware, one, several, shapes
from tests.lower.triton.legalize.promises import assert_expanded, ops_of
from tilekern.ir.compute import Convert, Monoid, Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Atomic, Store
from tilekern.ir.ordering import ArgReduce, Cumulative, Scan
from tilekern.ir.parse import parse
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import BOOL, DTYPES, F32, F64, DType, kind_of

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]
INTEGERS = [n for n, d in DTYPES.items() if kind_of(d) in ("signed", "unsigned")]
# Functions of which float32 gives the narrow dtypes' bits, rounded once more; all others but these are approximations.
EXACT = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "nextafter", "neg", "abs", "sign", "floor", "ceil", "is_finite"),
    *("round_even", "round_away", "sqrt", "eq", "ne", "lt", "le", "gt", "ge"),
}


def expanded(func: Func) -> Func:
    result = expanded_for(func, SM_90)
    assert_expanded(result, SM_90)
    return result


def assert_expands(func: Func, arrays: list[np.ndarray]) -> Func:
    return assert_keeps(expanded, func, arrays)


# --- converts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [*permutations(DTYPES, 2)])
def test_converts_of_special_numbers(source: str, target: str) -> None:
    assert_expands(*one(Convert, edges(DTYPES[source]), dtype=DTYPES[target]))


def around_ties(source: DType, target: DType) -> np.ndarray:
    """Numbers between two of `target`: half way, and as near to that as `source` can say."""
    step = float(ml_dtypes.finfo(target).eps)
    if kind_of(source) == "float":
        # Between 1 and the next two numbers; and from 2 on, where steps are twice as large.
        middles = np.array([1 + step / 2, 1 + 3 * step / 2, 2 + step], source)
        near = [middles, np.nextafter(middles, np.asarray(9, source)), np.nextafter(middles, np.asarray(0, source))]
        return np.concatenate([*near, *(-x for x in near)])
    limits = np.iinfo(source)
    # Half way between two numbers of 2^k.
    exact = [2**k * (1 + n * step + step / 2) for k in range(1, 63) for n in (0, 1)]
    middles = [int(x) for x in exact if x == int(x) and x + 2 < min(limits.max, 2**53)]
    return np.array([m + d for m in middles or [1] for d in (-1, 0, 1)], source)


@pytest.mark.parametrize(("source", "target"), [(s, t) for s in (*FLOATS, *INTEGERS) for t in FLOATS if s != t])
def test_narrowing_rounds_once_to_nearest_even(source: str, target: str) -> None:
    assert_expands(*one(Convert, around_ties(DTYPES[source], DTYPES[target]), dtype=DTYPES[target]))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", INTEGERS)
def test_floats_to_integers_saturate(source: str, target: str) -> None:
    """The limits, the floats next to them, infinities, and NaN, which gives 0."""
    limits, dtype = np.iinfo(DTYPES[target]), DTYPES[source]
    with np.errstate(all="ignore"):
        at = np.array([limits.min, limits.max, 0.0, 0.5, -0.5, -0.99, 1e300, -1e300], np.float64).astype(dtype)
        beside = [np.nextafter(at, np.asarray(x).astype(dtype)) for x in (np.inf, -np.inf)]
    assert_expands(*one(Convert, np.concatenate([at, *beside]), dtype=DTYPES[target]))


# --- elementwise ----------------------------------------------------------------------------------------------------


def operands_of(function: str, dtype: DType, rng: np.random.Generator) -> list[np.ndarray]:
    """Special numbers in random pairs; no integer is divided by 0."""
    special = np.tile(edges(dtype, 64), 3)
    found = [rng.permutation(special) for _ in range(TABLE[function].arity)]
    if function in ("div", "rem") and kind_of(dtype) != "float":
        found[1] = np.where(found[1] == 0, np.ones_like(found[1]), found[1])
    return found


@pytest.mark.parametrize(
    ("function", "name"), [(f, n) for f, row in TABLE.items() for n, d in DTYPES.items() if kind_of(d) in row.accepts]
)
def test_functions(function: str, name: str) -> None:
    dtype = DTYPES[name]
    arrays = operands_of(function, dtype, np.random.default_rng(dtype.itemsize))
    func, inputs = one(Elementwise, *arrays, function=function)
    if function in EXACT or kind_of(dtype) != "float":
        assert_expands(func, inputs)
    else:
        assert_approximates(func, inputs, function, arrays)


def assert_approximates(func: Func, inputs: list[np.ndarray], function: str, arrays: list[np.ndarray]) -> None:
    """Off by one rounding of the dtype at most."""
    with hardware(), np.errstate(all="ignore"):
        (found,) = interpret(expanded(func), *inputs)
        exact = TABLE[function].meaning(*(x.astype(F64) for x in arrays))
    for part in np.split(found, 2):
        assert_near(part, exact)


def test_narrow_functions_are_computed_in_float32_and_native_ones_are_not() -> None:
    bf16 = edges(DTYPES["bf16"])
    assert {op.operands[0].tile.dtype for op in ops_of(expand_one("exp", bf16), Elementwise)} == {F32}
    assert {op.operands[0].tile.dtype for op in ops_of(expand_one("add", bf16, bf16), Elementwise)} == {bf16.dtype}


def expand_one(function: str, *arrays: np.ndarray) -> Func:
    return expanded(one(Elementwise, *arrays, function=function)[0])


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
def test_iota(name: str) -> None:
    def lanes(b: Source, x: Value) -> list[Value]:
        return [b.op(Iota, shape=(3, 5), dtype=DTYPES[name], dim=d) for d in (0, 1)]

    assert_expands(*several(lanes, np.zeros(1, F32)))


# --- along dims -----------------------------------------------------------------------------------------------------

MONOIDS: tuple[Monoid, ...] = ("sum", "prod", "max", "min", "and", "or", "xor")
CUMULATIVE: tuple[Cumulative, ...] = ("sum", "prod", "max", "min")


def accepts(monoid: str, dtype: DType) -> bool:
    logical = monoid in ("and", "or", "xor")
    return kind_of(dtype) != "float" if logical else dtype != BOOL or monoid in ("max", "min")


def halves(dtype: DType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Few different numbers whose sums and products of up to five float32 and narrower ones have exactly."""
    low = 0 if kind_of(dtype) in ("unsigned", "bool") else -2
    return np.random.default_rng(seed).integers(low, 2, shape, endpoint=True).astype(dtype)


@pytest.mark.parametrize("monoid", MONOIDS)
@given(data=st.data())
def test_reductions(monoid: Monoid, data: st.DataObject) -> None:
    dtype = DTYPES[data.draw(st.sampled_from([n for n, d in DTYPES.items() if accepts(monoid, d)]))]
    shape = data.draw(shapes(sizes=st.integers(1, 5)))
    dims = data.draw(st.sets(st.sampled_from(range(len(shape))))) if shape else set[int]()
    x = halves(dtype, shape, data.draw(st.integers(0, 9)))
    assert_expands(*one(Reduce, x, monoid=monoid, dims=tuple(dims)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("monoid", CUMULATIVE)
@given(data=st.data())
def test_scans(monoid: Cumulative, reverse: bool, data: st.DataObject) -> None:
    dtype = DTYPES[data.draw(st.sampled_from([n for n, d in DTYPES.items() if d != BOOL]))]
    shape = data.draw(shapes(1, sizes=st.integers(1, 5)))
    x = halves(dtype, shape, data.draw(st.integers(0, 9)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert_expands(*one(Scan, x, monoid=monoid, dim=dim, reverse=reverse))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("extreme", ["max", "min"])
def test_positions_of_extremes(name: str, extreme: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.choice(edges(DTYPES[name], 32), (40, 5))
    for dim in (0, 1):
        assert_expands(*one(ArgReduce, x, extreme=extreme, dim=dim))


# --- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max", "min"])
def test_atomic_extremes_of_nan_are_of_the_sign_that_wins(kind: str) -> None:
    """They compare bits: a positive NaN is above all numbers, a negative one below."""
    func = parse(f"""
func @f(%x: ref<f32[4], in>, %o: ref<f32[4], zeros>) {{
  %0 = load %x[0 +: 4!] : f32[4]
  atomic %0 to %o[0 +: 4!] {{kind="{kind}"}}
}}""")

    def stored(op: Op, rewriter: Rewriter) -> tuple[Value, ...] | None:
        return rewriter.add(Store(operands=op.operands, access=op.access)) if isinstance(op, Atomic) else None

    x = np.array([np.nan, -np.nan, 1, -1], np.float32)
    (values,) = interpret(Rewriter(stored).run(expanded_for(func, SM_90)), x)
    assert np.isnan(values[:2]).all() and (np.signbit(values[:2]) == (kind == "min")).all()
    assert values[2:].tolist() == [1, -1]
