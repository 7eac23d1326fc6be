from tests.passes.golden import assert_becomes, func_of
from tilekern.passes.cse import cse


def test_equal_ops_become_one() -> None:
    assert_becomes(
        cse,
        """
        %1 = constant [1.0, -0.0] : f32[2]
        %2 = constant [1.0, -0.0] : f32[2]
        %3 = exp(%1) : f32[2]
        %4 = exp(%2) : f32[2]
        %5 = add(%3, %4) : f32[2]
        store %5 to %fs[0 +: 2]""",
        """
        %1 = constant [1.0, -0.0] : f32[2]
        %3 = exp(%1) : f32[2]
        %5 = add(%3, %3) : f32[2]
        store %5 to %fs[0 +: 2]""",
    )


def test_ops_that_differ_stay_two() -> None:
    func = func_of("""
        %1 = constant 0.0 : f32[2]
        %2 = constant -0.0 : f32[2]
        %3 = constant 0.0 : f32[4]
        %4 = constant 0 : i32[2]
        %5 = exp(%1) : f32[2]
        %6 = log(%1) : f32[2]
        %7 = sub(%5, %6) : f32[2]
        %8 = sub(%6, %5) : f32[2]
        %9 = load %x[%i +: 2] : f32[2]
        %10 = load %x[%j +: 2] : f32[2]
        store %7 to %fs[0 +: 2]""")
    assert cse(func) is func


def test_a_load_from_an_input_counts_one_from_an_output_does_not() -> None:
    assert_becomes(
        cse,
        """
        %1 = load %x[%i] : f32[]
        store %1 to %fs[%i]
        %2 = load %x[%i] : f32[]
        %3 = load %fs[%i] : f32[]
        %4 = add(%2, %3) : f32[]
        store %4 to %fs[%i]
        %5 = load %fs[%i] : f32[]
        store %5 to %ms[%i, %j]""",
        """
        %1 = load %x[%i] : f32[]
        store %1 to %fs[%i]
        %3 = load %fs[%i] : f32[]
        %4 = add(%1, %3) : f32[]
        store %4 to %fs[%i]
        %5 = load %fs[%i] : f32[]
        store %5 to %ms[%i, %j]""",
    )


def test_a_block_sees_the_ones_around_it_but_not_those_beside_it() -> None:
    assert_becomes(
        cse,
        """
        %1 = load %n[%i] : i32[]
        %2 = neg(%1) : i32[]
        %3 = switch(%1) do {
          %4 = neg(%1) : i32[]
          %5 = abs(%4) : i32[]
          yield %5
        } do {
          %6 = abs(%2) : i32[]
          yield %6
        } : i32[]
        %7 = abs(%2) : i32[]
        %8 = add(%3, %7) : i32[]
        store %8 to %is[%i]
        %9 = neg(%1) : i32[]
        store %9 to %is[%j]""",
        """
        %1 = load %n[%i] : i32[]
        %2 = neg(%1) : i32[]
        %3 = switch(%1) do {
          %5 = abs(%2) : i32[]
          yield %5
        } do {
          %6 = abs(%2) : i32[]
          yield %6
        } : i32[]
        %7 = abs(%2) : i32[]
        %8 = add(%3, %7) : i32[]
        store %8 to %is[%i]
        store %2 to %is[%j]""",
    )
