from tests.passes.golden import assert_becomes, func_of
from tilekern.passes.dce import dce

BOUNDS = """
    %1 = constant 0 : i32[]
    %2 = constant 20 : i32[]
    %3 = constant 1.0 : f32[]
"""


def test_what_nothing_uses_goes() -> None:
    assert_becomes(
        dce,
        BOUNDS
        + """
        %4 = load %x[%i] : f32[]
        %5 = load %x[%j] : f32[]
        %6 = exp(%5) : f32[]
        %7 = fold %k in k[20 by 4] from %1 to %2 with %c = %3 do {
          %8 = load %x[%k] : f32[]
          yield %8
        } : f32[]
        %9 = while(%3) do (%a: f32[]) {
          %10 = constant true : bool[]
          yield %10
        } do (%h: f32[]) {
          yield %h
        } : f32[]
        %11 = switch(%1) do {
          yield %7
        } : f32[]
        store %4 to %fs[%i]""",
        "%4 = load %x[%i] : f32[] store %4 to %fs[%i]",
    )


def test_a_store_keeps_the_ops_around_it() -> None:
    func = func_of(
        BOUNDS
        + """
        fold %k in k[20 by 4] from %1 to %2 do {
          %4 = while(%3) do (%a: f32[]) {
            %5 = lt(%a, %3) : bool[]
            yield %5
          } do (%h: f32[]) {
            %6 = neg(%h) : f32[]
            switch(%k) do {
              store %h to %fs[%i]
            } do {
            }
            yield %6
          } : f32[]
        }"""
    )
    assert dce(func) is func


def test_carries_that_only_feed_themselves_go() -> None:
    assert_becomes(
        dce,
        BOUNDS
        + """
        %4.0, %4.1, %4.2 = fold %k in k[20 by 4] from %1 to %2 with %a = %3, %c = %3, %d = %3 do {
          %5 = exp(%a) : f32[]
          %6 = neg(%d) : f32[]
          yield %5, %6, %c
        } : f32[], f32[], f32[]
        store %4.1 to %fs[%i]""",
        BOUNDS
        + """
        %4.0, %4.1 = fold %k in k[20 by 4] from %1 to %2 with %c = %3, %d = %3 do {
          %6 = neg(%d) : f32[]
          yield %6, %c
        } : f32[], f32[]
        store %4.0 to %fs[%i]""",
    )


def test_the_condition_keeps_a_carry_of_a_while() -> None:
    assert_becomes(
        dce,
        BOUNDS
        + """
        %4.0, %4.1, %4.2 = while(%3, %3, %1) do (%a: f32[], %c: f32[], %d: i32[]) {
          %5 = lt(%a, %3) : bool[]
          yield %5
        } do (%e: f32[], %g: f32[], %h: i32[]) {
          %6 = neg(%e) : f32[]
          yield %6, %e, %h
        } : f32[], f32[], i32[]
        store %4.1 to %fs[%i]""",
        """
        %3 = constant 1.0 : f32[]
        %4.0, %4.1 = while(%3, %3) do (%a: f32[], %c: f32[]) {
          %5 = lt(%a, %3) : bool[]
          yield %5
        } do (%e: f32[], %g: f32[]) {
          %6 = neg(%e) : f32[]
          yield %6, %e
        } : f32[], f32[]
        store %4.1 to %fs[%i]""",
    )


def test_unused_results_of_a_switch_go() -> None:
    assert_becomes(
        dce,
        BOUNDS
        + """
        %4.0, %4.1 = switch(%i) do {
          %5 = load %x[%i] : f32[]
          yield %5, %3
        } do {
          yield %3, %3
        } : f32[], f32[]
        store %4.1 to %fs[%i]""",
        """
        %3 = constant 1.0 : f32[]
        %4 = switch(%i) do {
          yield %3
        } do {
          yield %3
        } : f32[]
        store %4 to %fs[%i]""",
    )
