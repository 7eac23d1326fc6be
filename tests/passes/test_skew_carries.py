from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES, Lanes, Source, at, func, ref, whole
from tests.passes.golden import assert_becomes, func_of
from tests.passes.strategies import assert_same_meaning, funcs
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.core import Axis, Func, Value
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import I32
from tilekern.passes.pipeline import run
from tilekern.passes.skew_carries import skew_carries
from tilekern.passes.split_loops import split_loops


def skewed(func: Func) -> Func:
    return run(skew_carries(func))


# The grid has 12 by 2 programs, tiles of 8 by 16; arrays have 96 elements, `m` 96 by 20.
BEFORE = """
    %1 = constant 0 : i32[]
    %2 = constant 96 : i32[]
    %3 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %4 = constant 0.0 : f32[8, 8]
    %5 = fold %k in k[96 by 8] from %1 to %2{} with %c = %4 do {{
      %6 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %7 = dot(%3, %6) {{contract=[[1], [1]]}} : f32[8, 8]
      %8 = max(%7, %c) : f32[8, 8]
      %9 = dot(%8, %6) {{contract=[[1], [0]]}} : f32[8, 8]
      yield %9
    }} : f32[8, 8]
    store %5 to %ms[8*%i +: 8!, 0 +: 8!]"""
AFTER = """
    %1 = constant 0 : i32[]
    %2 = constant 96 : i32[]
    %3 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
    %4 = constant 0.0 : f32[8, 8]
    %5 = constant {bound} : i32[]
    %6 = load %m[{first} +: 8!, 0 +: 8!] : f32[8, 8]
    %7 = dot(%3, %6) {{contract=[[1], [1]]}} : f32[8, 8]
    %8.0, %8.1 = fold %k in k[96 by 8] from %1 to %2{reverse} with %c = %4, %9 = %7 do {{
      {following}
      %13 = load %m[8*%12 +: 8!, 0 +: 8!] : f32[8, 8]
      %14 = dot(%3, %13) {{contract=[[1], [1]]}} : f32[8, 8]
      %15 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
      %16 = max(%9, %c) : f32[8, 8]
      %17 = dot(%16, %15) {{contract=[[1], [0]]}} : f32[8, 8]
      yield %17, %14
    }} : f32[8, 8], f32[8, 8]
    store %8.0 to %ms[8*%i +: 8!, 0 +: 8!]"""
FORWARD = {
    "reverse": "",
    "bound": "11",
    "first": "0",
    "following": "%10 = constant 1 : i32[] %11 = add(%k, %10) : i32[] %12 = min(%11, %5) : i32[]",
}
REVERSE = {
    "reverse": " reverse",
    "bound": "1",
    "first": "88",
    "following": "%11 = sub(%k, %5) : i32[] %12 = max(%11, %1) : i32[]",
}


@pytest.mark.parametrize("direction", [FORWARD, REVERSE], ids=["forward", "reverse"])
def test_a_dot_that_another_needs_is_computed_one_tile_ahead(direction: dict[str, str]) -> None:
    assert_becomes(skewed, BEFORE.format(direction["reverse"]), AFTER.format(**direction))


STAY = {
    "a dot that only adds up": """
        %7 = dot(%3, %6) {contract=[[1], [1]]} : f32[8, 8]
        %8 = add(%7, %c) : f32[8, 8]
        yield %8""",
    "a dot that needs a carry": """
        %7 = dot(%c, %6) {contract=[[1], [1]]} : f32[8, 8]
        %8 = dot(%7, %6) {contract=[[1], [0]]} : f32[8, 8]
        yield %8""",
    "a dot of what is loaded from an output": """
        store %c to %ms[8*%k +: 8!, 0 +: 8!]
        %7 = load %ms[8*%k +: 8!, 0 +: 8!] : f32[8, 8]
        %8 = dot(%7, %6) {contract=[[1], [1]]} : f32[8, 8]
        %9 = dot(%8, %6) {contract=[[1], [0]]} : f32[8, 8]
        yield %9""",
}


@pytest.mark.parametrize("name", STAY)
def test_dots_that_stay(name: str) -> None:
    before = func_of(f"""
        %1 = constant 0 : i32[] %2 = constant 96 : i32[] %4 = constant 0.0 : f32[8, 8]
        %3 = load %m[8*%i +: 8!, 0 +: 8!] : f32[8, 8]
        %5 = fold %k in k[96 by 8] from %1 to %2 with %c = %4 do {{
          %6 = load %m[8*%k +: 8!, 0 +: 8!] : f32[8, 8] {STAY[name]}
        }} : f32[8, 8]""")
    assert skew_carries(before) is before


@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(func: Func, seed: int) -> None:
    assert_same_meaning(func, skew_carries(func), seed)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_meaning_of_an_example_stays(example: Callable[[], Func]) -> None:
    assert_same_meaning(example(), skew_carries(example()), seed=0)


@st.composite
def chains(draw: st.DrawFn) -> Func:
    """A fold in which dots of loaded tiles, at places that may be out of bounds, lead to further dots."""
    axis = Axis("k", draw(st.integers(0, 30)), draw(st.sampled_from([1, 4, 8])))
    n, x, y = (ref(name, shape, dtype=I32) for name, shape in (("n", (6,)), ("x", (4, 4)), ("y", (25, 4))))
    out, reverse, known = ref("out", (3, 4, 4), "out", I32), draw(st.booleans()), draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(["load", "mask"]), min_size=1, max_size=2))
    stride, shift = draw(st.sampled_from([4, 8, -4, 0])), draw(st.sampled_from([0, -3, 5]))

    def body(b: Source, i: Value) -> None:
        bounds = [b.load(n, at(i, 1, 3 * side)) for side in range(2)]
        bounds = [b.const(0), b.const(axis.extent)] if known else bounds
        left = b.load(x, whole(4), whole(4))

        def step(k: Value, carry: Value) -> tuple[Value, ...]:
            for kind in kinds:
                rows = b.load(y, Lanes("block", ((k, stride), (i, 1)), 4, shift), whole(4))
                dotted = b.op(Dot, left, rows, contract=((1,), (1,)))
                if kind == "mask":
                    total = b.op(Reduce, dotted, monoid="max", dims=(0, 1))
                    dotted = b.ew("add", dotted, b.op(Broadcast, total, shape=(4, 4), dims=()))
                mixed = b.ew("max", dotted, carry)
                carry = b.ew("add", b.op(Dot, mixed, rows, contract=((1,), (0,))), b.ew("add", carry, dotted))
            return (carry,)

        (total,) = b.fold(axis, *bounds, (b.const(1, (4, 4)),), step, reverse)
        b.store(out, total, at(i), whole(4), whole(4))

    return func("f", (n, x, y, out), (Axis("i", 3),), body)


@given(before=chains(), seed=st.integers(0, 1000))
def test_a_fold_with_chains_of_dots_means_the_same_skewed(before: Func, seed: int) -> None:
    improved = run(before)
    after = skew_carries(improved)
    assert_same_meaning(before, after, seed)
    assert_same_meaning(before, run(after), seed)
    assert_same_meaning(before, skewed(run(split_loops(improved))), seed)
    assert skew_carries(after) is after
