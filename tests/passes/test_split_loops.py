from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES, Lanes, Source, assert_same, at, func, ref, whole
from tests.passes.golden import assert_becomes
from tests.passes.strategies import assert_same_meaning, funcs
from tilekern.ir.compute import Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Func, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import I32
from tilekern.ir.verify import verify
from tilekern.passes.pipeline import run
from tilekern.passes.split_loops import split_loops


def split(func: Func) -> Func:
    return run(split_loops(func))


def folds(func: Func) -> int:
    return sum(isinstance(op, Fold) for op in func.walk())


# The grid has 12 by 2 programs, tiles of 8 by 16; arrays have 96 elements, `m` 96 by 20.
CASES = {
    "a ragged access": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 20 : i32[]
        %3 = constant 0.0 : f32[8]
        %4 = fold %k in k[20 by 8] from %1 to %2 with %c = %3 do {
          %5 = load %m[%i!, 8*%k +: 8] : f32[8]
          %6 = add(%c, %5) : f32[8]
          yield %6
        } : f32[8]
        store %4 to %fs[8*%i +: 8!]""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 20 : i32[]
        %3 = constant 0.0 : f32[8]
        %4 = constant 16 : i32[]
        %5 = fold %k in k[20 by 8] from %1 to %4 with %c = %3 do {
          %6 = load %m[%i!, 8*%k +: 8!] : f32[8]
          %7 = add(%c, %6) : f32[8]
          yield %7
        } : f32[8]
        %8 = fold %k_1 in k[20 by 8] from %4 to %2 with %c_1 = %5 do {
          %9 = load %m[%i!, 8*%k_1 +: 8] : f32[8]
          %10 = add(%c_1, %9) : f32[8]
          yield %10
        } : f32[8]
        store %8 to %fs[8*%i +: 8!]""",
    ),
    "the diagonal": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        %3 = constant 8 : i32[]
        %4 = iota() {dim=0} : i32[8]
        %5 = mul(%i, %3) : i32[]
        %6 = broadcast(%5) {dims=[]} : i32[8]
        %7 = add(%6, %4) : i32[8]
        fold %k in k[96 by 8] from %1 to %2 do {
          %8 = mul(%k, %3) : i32[]
          %9 = broadcast(%8) {dims=[]} : i32[8]
          %10 = add(%9, %4) : i32[8]
          %11 = ge(%7, %10) : bool[8]
          store %11 to %bs[8*%k +: 8!]
        }""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        %3 = constant 8 : i32[]
        %4 = iota() {dim=0} : i32[8]
        %5 = mul(%i, %3) : i32[]
        %6 = broadcast(%5) {dims=[]} : i32[8]
        %7 = add(%6, %4) : i32[8]
        %8 = constant 1 : i32[]
        %9 = add(%8, %5) : i32[]
        %10 = div(%9, %3) : i32[]
        %11 = mul(%10, %3) : i32[]
        fold %k in k[96 by 8] from %1 to %11 do {
          %12 = constant true : bool[8]
          store %12 to %bs[8*%k +: 8!]
        }
        fold %k_1 in k[96 by 8] from %11 to %2 do {
          %13 = mul(%k_1, %3) : i32[]
          %14 = broadcast(%13) {dims=[]} : i32[8]
          %15 = add(%14, %4) : i32[8]
          %16 = ge(%7, %15) : bool[8]
          store %16 to %bs[8*%k_1 +: 8!]
        }""",
    ),
    "a mask that holds from some tile on, in reverse": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        fold %k in k[96 by 8] from %1 to %2 reverse do {
          %3 = gt(%k, %i) : bool[]
          store %3 to %bs[%k!]
        }""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        %3 = constant 1 : i32[]
        %4 = add(%3, %i) : i32[]
        %5 = constant 8 : i32[]
        %6 = mul(%4, %5) : i32[]
        fold %k in k[96 by 8] from %6 to %2 reverse do {
          %7 = constant true : bool[]
          store %7 to %bs[%k!]
        }
        fold %k_1 in k[96 by 8] from %1 to %6 reverse do {
          %8 = gt(%k_1, %i) : bool[]
          store %8 to %bs[%k_1!]
        }""",
    ),
    "a scalar of which nothing is known": (
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        %3 = load %n[%i!] : i32[]
        fold %k in k[96 by 8] from %1 to %2 do {
          %4 = lt(%k, %3) : bool[]
          store %4 to %bs[%k!]
        }""",
        """
        %1 = constant 0 : i32[]
        %2 = constant 96 : i32[]
        %3 = load %n[%i!] : i32[]
        %4 = constant 12 : i32[]
        %5 = max(%3, %1) : i32[]
        %6 = constant -268435456 : i32[]
        %7 = ge(%3, %6) : bool[]
        %8 = constant 268435456 : i32[]
        %9 = le(%3, %8) : bool[]
        %10 = and(%7, %9) : bool[]
        %11 = select(%10, %5, %1) : i32[]
        %12 = min(%4, %11) : i32[]
        %13 = constant 8 : i32[]
        %15 = mul(%12, %13) : i32[]
        fold %k in k[96 by 8] from %1 to %15 do {
          %16 = constant true : bool[]
          store %16 to %bs[%k!]
        }
        fold %k_1 in k[96 by 8] from %15 to %2 do {
          %17 = lt(%k_1, %3) : bool[]
          store %17 to %bs[%k_1!]
        }""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_folds_are_split_where_masks_change(name: str) -> None:
    assert_becomes(split, *CASES[name])


UNCHANGED = {
    "what holds everywhere": "%3 = load %x[8*%k +: 8!] : f32[8]",
    "what no split makes hold": "%3 = load %x[8*%i + 1 +: 8] : f32[8]",
    "a place from memory": "%3 = load %n[%k!] : i32[] %4 = load %x[%3] : f32[] store %4 to %fs[%k!]",
    "equality": "%3 = eq(%k, %i) : bool[] store %3 to %bs[%k!]",
    "no line": "%3 = mul(%k, %k) : i32[] %4 = le(%3, %i) : bool[] store %4 to %bs[%k!]",
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_folds_that_stay(name: str) -> None:
    text = (
        f"%1 = constant 0 : i32[] %2 = constant 96 : i32[] fold %k in k[96 by 8] from %1 to %2 do {{{UNCHANGED[name]}}}"
    )
    assert_becomes(split_loops, text, text)


@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(func: Func, seed: int) -> None:
    split_once = split_loops(func)
    assert_same_meaning(func, split_once, seed)
    assert_same_meaning(func, split(run(func)), seed)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func]) -> None:
    assert_same_meaning(example(), split_loops(example()), seed=0)
    assert_same_meaning(example(), split(run(example())), seed=0)


# --- folds with masks ------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 5, 9, 17, -30, 2**28, 2**28 + 1, -(2**28) - 1, 2**31 - 1, 2**31 - 5, -(2**31), -(2**31) + 5]


@st.composite
def masked_folds(draw: st.DrawFn) -> tuple[Func, np.ndarray]:
    """A fold that adds up, in an order that matters, what masks and bounds leave; and the numbers that it loads."""
    axis = Axis("k", draw(st.integers(0, 24)), draw(st.sampled_from([1, 3, 4, 8])))
    numbers = np.array([draw(st.sampled_from(NUMBERS)) for _ in range(4)], np.int32)
    x, n, out = ref("x", (29,), dtype=I32), ref("n", (4,), dtype=I32), ref("out", (3, 4), "out", I32)
    steps, reverse = (
        draw(st.lists(st.sampled_from(["mask", "mask", "load"]), min_size=1, max_size=3)),
        draw(st.booleans()),
    )
    small = st.sampled_from([-8, -3, -1, 0, 1, 1, 3, 8])

    def body(b: Source, i: Value) -> None:
        scalars = [i, *(b.load(n, Lanes("index", (), 1, place, True)) for place in range(2))]
        bounds = [b.load(n, Lanes("index", (), 1, 2 + place, True)) for place in range(2)]
        if draw(st.booleans()):
            bounds = [b.const(0), b.const(axis.extent)]
        lanes = b.op(Iota, shape=(4,), dtype=I32, dim=0)

        def line(k: Value) -> Value:
            total = b.ew("mul", lanes, b.const(draw(small), (4,)))
            for value in (k, draw(st.sampled_from(scalars)), draw(st.sampled_from(scalars))):
                scaled = b.ew("mul", value, b.const(draw(small)))
                total = b.ew(draw(st.sampled_from(["add", "sub"])), total, b.op(Broadcast, scaled, shape=(4,), dims=()))
            return b.ew("add", total, b.const(draw(st.integers(-20, 60)), (4,)))

        def step(k: Value, carry: Value) -> tuple[Value, ...]:
            for kind in steps:
                if kind == "mask":
                    mask = b.ew(draw(st.sampled_from(["lt", "le", "gt", "ge"])), line(k), line(k))
                    found = b.op(Select, mask, b.ew("add", lanes, b.const(1, (4,))), b.const(0, (4,)))
                else:
                    terms = ((k, draw(small)), (draw(st.sampled_from(scalars)), draw(small)))
                    found = b.load(x, Lanes("block", terms, 4, draw(st.integers(-8, 20))))
                carry = b.ew("add", b.ew("mul", carry, b.const(3, (4,))), found)
            return (carry,)

        (total,) = b.fold(axis, bounds[0], bounds[1], (b.const(1, (4,)),), step, reverse)
        b.store(out, total, at(i), whole(4))

    return func("f", (x, n, out), (Axis("i", 3),), body), numbers


@given(case=masked_folds())
def test_a_fold_with_masks_means_the_same_split(case: tuple[Func, np.ndarray]) -> None:
    before, numbers = case
    after = split_loops(before)
    assume(after is not before)
    verify(after)
    arrays = np.arange(1, 30, dtype=np.int32), numbers
    (expected,) = interpret(before, *arrays, orders=1)
    for variant in (after, run(after)):
        assert_same(interpret(variant, *arrays, orders=1)[0], expected)


LARGE = """
    %1 = constant 0 : i32[]
    %2 = constant 96 : i32[]
    %3 = load %n[%i!] : i32[]
    %4 = iota() {dim=0} : i32[8]
    %5 = broadcast(%3) {dims=[]} : i32[8]
    %6 = add(%5, %4) : i32[8]
    fold %k in k[96 by 8] from %1 to %2 do {
      %7 = broadcast(%k) {dims=[]} : i32[8]
      %8 = ge(%6, %7) : bool[8]
      store %8 to %o[%i!, 8*%k +: 8!]
    }"""


def test_scalars_that_make_a_mask_wrap_around() -> None:
    before = parse(f"func @f(%n: ref<i32[14], in>, %o: ref<bool[14, 96], out>) {{ grid %i in i[14 by 1] {LARGE} }}")
    after = split_loops(before)
    assert folds(after) == 2
    numbers = np.array(NUMBERS, np.int32)
    (expected,) = interpret(before, numbers)
    assert not expected[NUMBERS.index(2**31 - 5)].all(), "this one wraps"
    assert_same(interpret(after, numbers)[0], expected)


def test_a_causal_fold_has_three_parts() -> None:
    assert folds(split(run(EXAMPLES["causal"]()))) == 3
