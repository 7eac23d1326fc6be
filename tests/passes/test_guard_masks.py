from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES
from tests.passes.golden import assert_becomes, func_of
from tests.passes.strategies import assert_same_meaning, funcs, softmaxes
from tilekern.ir.compute import Select
from tilekern.ir.control import Switch
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.parse import parse
from tilekern.passes.dce import dce
from tilekern.passes.guard_masks import guard_masks
from tilekern.passes.pipeline import run

every = partial(guard_masks, beside=lambda dot: True)


def guarded(func: Func) -> Func:
    return run(dce(every(func)))


HEAD = """
    %1 = constant 0 : i32[] %2 = constant 96 : i32[] %3 = constant 8 : i32[]
    %4 = iota() {dim=0} : i32[8, 8] %5 = iota() {dim=1} : i32[8, 8]
    %6 = mul(%i, %3) : i32[] %7 = broadcast(%6) {dims=[]} : i32[8, 8] %8 = add(%7, %4) : i32[8, 8]
    %9 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %10 = constant 0.0 : f32[8, 8] %11 = constant -1.0 : f32[8, 8]
    %12 = fold %k in k[96 by 8] from %1 to %2 with %c = %10 do {
      %13 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %14 = mul(%k, %3) : i32[] %15 = broadcast(%14) {dims=[]} : i32[8, 8] %16 = add(%15, %5) : i32[8, 8]"""
TAIL = """
      %21 = add(%20, %c) : f32[8, 8]
      yield %21
    } : f32[8, 8]
    store %12 to %ms[8*%i +: 8!, 8*%j +: 8!]"""
CAUSAL = """
      %17 = ge(%8, %16) : bool[8, 8]
      %18 = dot(%9, %13) {contract=[[1], [1]]} : f32[8, 8]
      %20 = select(%17, %18, %11) : f32[8, 8]"""


AFTER = """
    %0 = constant 0 : i32[] %1 = constant 96 : i32[] %2 = constant 8 : i32[]
    %3 = iota() {dim=0} : i32[8, 8] %4 = iota() {dim=1} : i32[8, 8]
    %5 = mul(%i, %2) : i32[] %6 = broadcast(%5) {dims=[]} : i32[8, 8] %7 = add(%6, %3) : i32[8, 8]
    %8 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %9 = constant 0.0 : f32[8, 8] %10 = constant -1.0 : f32[8, 8]
    %11 = constant 1 : i32[] %12 = add(%11, %5) : i32[] %13 = div(%12, %2) : i32[]
    %14 = fold %k in k[96 by 8] from %0 to %1 with %c = %9 do {
      %15 = lt(%k, %13) : bool[] %16 = convert(%15) : i32[]
      %17 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %18 = dot(%8, %17) {contract=[[1], [1]]} : f32[8, 8]
      %19 = switch(%16) do {
        %20 = mul(%k, %2) : i32[] %21 = broadcast(%20) {dims=[]} : i32[8, 8] %22 = add(%21, %4) : i32[8, 8]
        %23 = ge(%7, %22) : bool[8, 8]
        %24 = select(%23, %18, %10) : f32[8, 8]
        yield %24
      } do {
        yield %18
      } : f32[8, 8]
      %25 = add(%19, %c) : f32[8, 8]
      yield %25
    } : f32[8, 8]
    store %14 to %ms[8*%i +: 8!, 8*%j +: 8!]"""


def test_tiles_below_the_diagonal_need_no_mask() -> None:
    assert_becomes(guarded, HEAD + CAUSAL + TAIL, AFTER)


WINDOW = """
      %17 = ge(%8, %16) : bool[8, 8]
      %18 = dot(%9, %13) {contract=[[1], [1]]} : f32[8, 8]
      %19 = constant 20 : i32[8, 8] %26 = sub(%8, %19) : i32[8, 8] %27 = ge(%16, %26) : bool[8, 8]
      %28 = and(%17, %27) : bool[8, 8]
      %20 = select(%28, %18, %11) : f32[8, 8]"""
IDS = """
      %17 = ge(%8, %16) : bool[8, 8]
      %18 = dot(%9, %13) {contract=[[1], [1]]} : f32[8, 8]
      %19 = gt(%18, %11) : bool[8, 8] %28 = and(%17, %19) : bool[8, 8]
      %20 = select(%28, %18, %11) : f32[8, 8]"""


@pytest.mark.parametrize(("body", "left"), [(WINDOW, 0), (IDS, 1)], ids=["window", "another mask"])
def test_middle_tiles_drop_the_comparisons_of_positions_alone(body: str, left: int) -> None:
    ops = (HEAD + body + TAIL).replace("8*%j", "0")
    params = "%m: ref<f32[96, 20], in>, %ms: ref<f32[96, 8], out>"
    before = parse(f"func @f({params}) {{ grid %i in i[96 by 8]\n{ops}\n}}")
    after = guarded(run(before))
    assert_same_meaning(before, after, seed=3)
    (switch,) = (op for op in after.walk() if isinstance(op, Switch))
    assert [sum(isinstance(op, Select) for op in region.ops) for region in switch.regions] == [1, 0]
    assert sum(isinstance(op, Select) for op in after.walk()) == 1 + left


STAY = {
    "a fold without dots": ("dot(%9, %13) {contract=[[1], [1]]}", "add(%9, %13)"),
    "a mask of no positions": ("ge(%8, %16) : bool[8, 8]", "gt(%9, %13) : bool[8, 8]"),
    "a mask that no tile is without": ("ge(%8, %16) : bool[8, 8]", "eq(%8, %16) : bool[8, 8]"),
}


@pytest.mark.parametrize("name", STAY)
def test_masks_that_stay(name: str) -> None:
    old, new = STAY[name]
    text = HEAD + CAUSAL + TAIL
    assert old in text
    before = run(func_of(text.replace(old, new)))
    assert every(before) is before


def test_the_end_of_an_array_does_not_shorten_the_middle() -> None:
    """The last tile of k reaches over the end. Its loads are masked anyway, so only the comparison counts."""
    params = "%m: ref<f32[90, 8], in>, %ms: ref<f32[96, 8], out>"
    text = (HEAD + CAUSAL + TAIL).replace("8*%j", "0").replace("8*%k +: 8!", "8*%k +: 8").replace("k[96 by", "k[90 by")
    before = run(parse(f"func @f({params}) {{ grid %i in i[88 by 8]\n{text}\n}}"))
    assert "load %m[8*%k +: 8, " in str(before)
    ends = [op for op in every(before).walk() if isinstance(op, Elementwise) and op.function in ("min", "lt")]
    assert [op.function for op in ends] == ["lt"]


def test_dots_that_run_beside_nothing_stay() -> None:
    before = run(func_of(HEAD + CAUSAL + TAIL))
    assert guard_masks(before, beside=lambda dot: False) is before


@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(func: Func, seed: int) -> None:
    assert_same_meaning(func, every(func), seed)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func]) -> None:
    assert_same_meaning(example(), every(example()), seed=0)


@settings(max_examples=40)
@given(before=softmaxes(), seed=st.integers(0, 1000))
def test_a_fold_as_of_attention_means_the_same(before: Func, seed: int) -> None:
    improved = run(before)
    assert_same_meaning(before, every(improved), seed)
    assert_same_meaning(before, guarded(improved), seed)
