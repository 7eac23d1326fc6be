from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES
from tests.passes.golden import assert_becomes, func_of
from tests.passes.strategies import assert_same_meaning, funcs, softmaxes
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.passes.delay_dots import Sizes, delay_dots
from tilekern.passes.guard_masks import guard_masks
from tilekern.passes.pipeline import run
from tilekern.passes.split_loops import split_loops

every = partial(delay_dots, beside=lambda dot: True, pays=lambda sizes: True)


def delayed(func: Func) -> Func:
    return run(every(func))


# The grid has 12 by 2 programs, tiles of 8 by 16; arrays have 96 elements, `m` 96 by 20.
HEAD = """
    %1 = constant 0 : i32[]
    %2 = constant 96 : i32[]
    %3 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %4 = constant 0.0 : f32[8, 8]"""
BEFORE = (
    HEAD
    + """
    %5.0, %5.1 = fold %k in k[96 by 8] from %1 to %2 with %m_1 = %4, %c = %4 do {
      %6 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %7 = dot(%3, %6) {contract=[[1], [1]]} : f32[8, 8]
      %8 = max(%7, %m_1) : f32[8, 8]
      %9 = exp(%8) : f32[8, 8]
      %10 = mul(%c, %8) : f32[8, 8]
      %11 = load %m[8*%k +: 8!, 8 +: 8!] : f32[8, 8]
      %12 = dot(%9, %11) {contract=[[1], [0]]} : f32[8, 8]
      %13 = add(%10, %12) : f32[8, 8]
      yield %8, %13
    } : f32[8, 8], f32[8, 8]
    store %5.1 to %ms[8*%i +: 8!, 0 +: 8!]
    store %5.0 to %ms[8*%i +: 8!, 8 +: 8!]"""
)


AFTER = """
    %1 = constant 96 : i32[]
    %2 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %3 = constant 0.0 : f32[8, 8]
    %4 = constant 8 : i32[]
    %5 = load %m[0 +: 8!, 0 +: 8!] : f32[8, 8]
    %6 = dot(%2, %5) {contract=[[1], [1]]} : f32[8, 8]
    %7 = max(%6, %3) : f32[8, 8]
    %8 = exp(%7) : f32[8, 8]
    %9.0, %9.1, %9.2 = fold %k in k[96 by 8] from %4 to %1 with %m_1 = %7, %c = %3, %10 = %8 do {
      %11 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %12 = dot(%2, %11) {contract=[[1], [1]]} : f32[8, 8]
      %13 = mul(%c, %m_1) : f32[8, 8]
      %14 = load %m[8*%k - 8 +: 8!, 8 +: 8!] : f32[8, 8]
      %15 = dot(%10, %14) {contract=[[1], [0]]} : f32[8, 8]
      %16 = add(%13, %15) : f32[8, 8]
      %17 = max(%12, %m_1) : f32[8, 8]
      %18 = exp(%17) : f32[8, 8]
      yield %17, %16, %18
    } : f32[8, 8], f32[8, 8], f32[8, 8]
    %19 = mul(%9.1, %9.0) : f32[8, 8]
    %20 = load %m[88 +: 8!, 8 +: 8!] : f32[8, 8]
    %21 = dot(%9.2, %20) {contract=[[1], [0]]} : f32[8, 8]
    %22 = add(%19, %21) : f32[8, 8]
    store %22 to %ms[8*%i +: 8!, 0 +: 8!]
    store %9.0 to %ms[8*%i +: 8!, 8 +: 8!]"""


def test_the_last_dot_runs_an_iteration_later() -> None:
    """A maximum, which is yielded anyway, is no carry twice; the exponential becomes one."""
    assert_becomes(delayed, BEFORE, AFTER)


STAY = {
    "a fold in reverse": ("to %2 with", "to %2 reverse with"),
    "a fold that may run no tile": ("from %1 to %2", "from %1 to %i"),
    "a sum that others need": ("%8 = max(%7, %m_1)", "%8 = max(%7, %c)"),
    "a dot that waits for no other": ("dot(%9, %11)", "dot(%3, %11)"),
    "a dot of a tile that another dot needs": ("dot(%9, %11)", "dot(%9, %6)"),
    "a dot of the first dot itself": ("dot(%9, %11)", "dot(%7, %11)"),
    "a carry that is not the sum": ("yield %8, %13", "yield %8, %10"),
    "a dot that others need": ("yield %8, %13", "%14 = max(%8, %12) : f32[8, 8] yield %14, %13"),
}


@pytest.mark.parametrize("name", STAY)
def test_dots_that_stay(name: str) -> None:
    old, new = STAY[name]
    assert old in BEFORE
    before = run(func_of(BEFORE.replace(old, new)))
    assert every(before) is before


IN_BF16 = """
      %6 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %14 = convert(%6) : bf16[8, 8] %15 = convert(%3) : bf16[8, 8]
      %7 = dot(%15, %14) {contract=[[1], [1]]} : f32[8, 8]
      %8 = max(%7, %m_1) : f32[8, 8]
      %9 = exp(%8) : f32[8, 8]
      %10 = mul(%c, %8) : f32[8, 8]
      %16 = convert(%9) : bf16[8, 8]
      %12 = dot(%16, %14) {contract=[[1], [0]]} : f32[8, 8]"""


def test_a_dot_of_a_cast_tile_that_another_dot_needs_stays() -> None:
    begin, end = BEFORE.index("%6 = load"), BEFORE.index("%13 = add")
    before = run(func_of(BEFORE[:begin] + IN_BF16 + "\n" + BEFORE[end:]))
    assert every(before) is before


def test_a_dot_may_wait_if_the_first_dot_alone_needs_a_tile() -> None:
    """The tile is the first operand of the first dot, whose result is computed and not loaded."""
    before = run(func_of(BEFORE.replace("dot(%3, %6)", "dot(%6, %3)")))
    assert every(before) is not before


def test_numbers_of_the_index_are_computed_again_and_not_carried() -> None:
    numbers = "%14 = mul(%k, %k) : i32[] %15 = convert(%14) : f32[] %16 = broadcast(%15) {dims=[]} : f32[8, 8]"
    before = run(func_of(BEFORE.replace("%10 = mul(%c, %8)", f"{numbers} %10 = mul(%c, %16)")))
    (fold,) = (op for op in every(before).walk() if isinstance(op, Fold))
    assert len(fold.inits) == 3


def test_what_does_not_pay_stays() -> None:
    """Carries of 64 elements: the sum, the maximum and the exponential; and another dot."""
    before, asked = run(func_of(BEFORE)), list[Sizes]()
    assert delay_dots(before, beside=lambda dot: True, pays=asked.append) is before  # pyright: ignore[reportArgumentType]
    assert asked == [Sizes(total=64, before=192, after=256)]
    assert delay_dots(before, beside=lambda dot: False, pays=lambda sizes: True) is before


@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(func: Func, seed: int) -> None:
    assert_same_meaning(func, every(func), seed)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func]) -> None:
    assert_same_meaning(example(), every(example()), seed=0)


@settings(max_examples=40)
@given(before=softmaxes(), seed=st.integers(0, 1000))
def test_a_fold_as_of_attention_means_the_same(before: Func, seed: int) -> None:
    """Delayed alone, behind guards of its masks, and behind a split at them."""
    improved = run(before)
    guarded = run(guard_masks(improved, beside=lambda dot: True))
    for one in (improved, guarded, run(split_loops(improved))):
        assert_same_meaning(before, every(one), seed)
        assert_same_meaning(before, delayed(one), seed)
