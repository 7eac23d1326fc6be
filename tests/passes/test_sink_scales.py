from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES, Source, assert_same, at, func, ref, tile, whole
from tests.passes.golden import assert_becomes, func_of
from tests.passes.strategies import assert_same_meaning, funcs
from tilekern.ir.compute import Reduce, Select
from tilekern.ir.core import Axis, Func, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.types import BOOL, F32
from tilekern.passes.pipeline import run
from tilekern.passes.sink_scales import sink_scales

HEAD = """
    %1 = load %x[8*%i +: 8!] : f32[8]
    %2 = constant 0.5 : f32[8]"""
TAIL = """
    %9 = broadcast(%8) {dims=[]} : f32[8]
    %10 = sub(%7, %9) : f32[8]
    store %10 to %fs[8*%i +: 8!]"""
BEFORE = (
    HEAD
    + """
    %7 = mul(%1, %2) : f32[8]
    %8 = reduce(%7) {monoid="max", dims=[0]} : f32[]"""
    + TAIL
)
AFTER = """
    %1 = load %x[8*%i +: 8!] : f32[8]
    %2 = constant 0.5 : f32[8]
    %3 = mul(%1, %2) : f32[8]
    %4 = reduce(%1) {monoid="max", dims=[0]} : f32[]
    %5 = constant 0.5 : f32[]
    %6 = mul(%4, %5) : f32[]
    %7 = broadcast(%6) {dims=[]} : f32[8]
    %8 = sub(%3, %7) : f32[8]
    store %8 to %fs[8*%i +: 8!]"""
MASK = """
    %3 = constant 2.0 : f32[8] %4 = lt(%1, %3) : bool[8] %5 = constant -inf : f32[8]"""
MASKED = (
    HEAD
    + MASK
    + """
    %6 = mul(%1, %2) : f32[8]
    %7 = select(%4, %6, %5) : f32[8]
    %8 = reduce(%7) {monoid="max", dims=[0]} : f32[]"""
    + TAIL
)
AFTER_MASKED = (
    HEAD
    + MASK
    + """
    %6 = select(%4, %1, %5) : f32[8]
    %7 = mul(%6, %2) : f32[8]
    %11 = reduce(%6) {monoid="max", dims=[0]} : f32[]
    %12 = constant 0.5 : f32[]
    %8 = mul(%11, %12) : f32[]"""
    + TAIL
)


def sunk(given: Func) -> Func:
    return run(sink_scales(given))


def test_a_maximum_is_scaled_in_the_place_of_its_elements() -> None:
    assert_becomes(sunk, BEFORE, AFTER)


def test_a_scale_sinks_below_a_mask() -> None:
    assert_becomes(sunk, MASKED, AFTER_MASKED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mul(%1, %2)", "mul(%2, %1)"),
        ('monoid="max"', 'monoid="min"'),
        ("select(%4, %6, %5)", "select(%4, %5, %6)"),
        ("constant -inf", "constant inf"),
    ],
)
def test_forms_of_it(old: str, new: str) -> None:
    """After the pass, the maximum is of numbers that nothing scales."""
    assert old in MASKED
    params = "%x: ref<f32[96], in>, %fs: ref<f32[96], out>"
    before = run(parse(f"func @f({params}) {{ grid %i in i[96 by 8]\n{MASKED.replace(old, new)}\n}}"))
    after = sunk(before)
    made = {value: op for op in after.walk() for value in op.results}
    (most,) = (op for op in after.walk() if isinstance(op, Reduce))
    (chosen,) = most.operands
    assert isinstance(made[chosen], Select)
    assert not any(isinstance(made[v], Elementwise) for v in made[chosen].operands[1:])
    assert_same_meaning(before, after, seed=3)


STAY = {
    "a negative constant": ("constant 0.5", "constant -0.5"),
    "zero, for 0 times infinity": ("constant 0.5", "constant 0.0"),
    "infinity": ("constant 0.5", "constant inf"),
    "NaN": ("constant 0.5", "constant nan"),
    "a subnormal, which a machine may read as zero": ("constant 0.5", "constant 1e-40"),
    "a sum": ("mul(%1, %2)", "add(%1, %2)"),
    "a quotient, which no sum absorbs": ("mul(%1, %2)", "div(%1, %2)"),
    "no constant": ("mul(%1, %2)", "mul(%1, %1)"),
    "a sum over the elements": ('monoid="max"', 'monoid="sum"'),
}
STAY_MASKED = {
    "a filling that the scale changes": ("constant -inf", "constant -1.0"),
    "a product that others need": ("sub(%7, %9)", "sub(%6, %9)"),
}


@pytest.mark.parametrize("name", [*STAY, *STAY_MASKED])
def test_scales_that_stay(name: str) -> None:
    text = BEFORE if name in STAY else MASKED
    old, new = {**STAY, **STAY_MASKED}[name]
    assert old in text
    before = run(func_of(text.replace(old, new)))
    assert sink_scales(before) is before


def test_integers_wrap_around_and_stay() -> None:
    text = BEFORE.replace("f32", "i32").replace("0.5", "3").replace("%x", "%n").replace("%fs", "%is")
    before = run(func_of(text))
    assert sink_scales(before) is before


_DTYPES = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), F32, np.dtype("float64"))


@st.composite
def scaled(draw: st.DrawFn) -> tuple[Func, list[np.ndarray]]:
    """A reduction of scaled numbers, some of them masked, of any dtype, with products that overflow or underflow."""
    dtype = draw(st.sampled_from(_DTYPES))
    limits = ml_dtypes.finfo(dtype)
    exponent = draw(st.integers(int(limits.minexp), int(limits.maxexp) - 1))
    by = np.ldexp(draw(st.sampled_from([1.0, 1.1, 1.5, 1.999])), exponent)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    x = np.ldexp(rng.uniform(-2, 2, (6, 8)), rng.integers(limits.minexp - 3, limits.maxexp, (6, 8)))
    x = np.where(rng.random((6, 8)) < draw(st.sampled_from([0, 0.2])), rng.choice([np.inf, -np.inf, np.nan, 0.0]), x)
    monoid, masked = draw(st.sampled_from(["max", "min"])), draw(st.booleans())
    infinity = draw(st.sampled_from([np.inf, -np.inf]))
    dims = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    kept = tuple(n for d, n in enumerate((2, 8)) if d not in dims)
    numbers, mask = ref("x", (6, 8), dtype=dtype), ref("p", (6, 8), dtype=BOOL)
    out, most = ref("o", (6, 8), "out", dtype), ref("m", (3, *kept), "out", dtype)

    def body(b: Source, i: Value) -> None:
        rows = tile(i, 2)
        s = b.ew("mul", b.load(numbers, rows, whole(8)), b.const(by, (2, 8), dtype))
        if masked:
            s = b.op(Select, b.load(mask, rows, whole(8)), s, b.const(infinity, (2, 8), dtype))
        b.store(out, s, rows, whole(8))
        b.store(most, b.op(Reduce, s, monoid=monoid, dims=dims), at(i), *map(whole, kept))

    with np.errstate(all="ignore"):
        arrays = [x.astype(dtype), rng.random((6, 8)) < 0.7]
    return func("f", (numbers, mask, out, most), (Axis("i", 3),), body), arrays


@given(case=scaled())
def test_the_largest_product_is_that_of_the_largest_number(case: tuple[Func, list[np.ndarray]]) -> None:
    """Bit for bit, but for the sign of a zero."""
    before, arrays = case
    after = sink_scales(before)
    assert after is not before
    for expected, found in zip(interpret(before, *arrays), interpret(after, *arrays), strict=True):
        assert_same(found, expected, zeros=False)


@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(func: Func, seed: int) -> None:
    assert_same_meaning(func, sink_scales(func), seed)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func]) -> None:
    assert_same_meaning(example(), sink_scales(example()), seed=0)
