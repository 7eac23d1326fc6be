"""Positions against Python's integers, which know no width."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.memory import Position, Term
from tilekern.lower.positions import FAR, index, locate, wrapped
from tilekern.lower.sizes import LONGEST_INT32

LEAST, MOST = -(2**31), 2**31 - 1
NUMBERS = st.integers(LEAST, MOST) | st.sampled_from([LEAST, LEAST + 1, -1, 0, 1, MOST - 3, MOST])
STRIDES = st.integers(-9, 9) | st.sampled_from([2**k + n for k in (10, 11, 20, 22, 31) for n in (-1, 0, 1)])


@st.composite
def positions(draw: st.DrawFn) -> tuple[Position, list[int]]:
    """A position and its numbers; of two equal terms with opposite strides, so that sums cancel out, often one."""
    numbers = draw(st.lists(NUMBERS, min_size=1, max_size=3))
    strides = draw(st.lists(STRIDES, min_size=len(numbers), max_size=len(numbers)))
    if draw(st.booleans()) and len(numbers) > 1:
        strides[1], numbers[1] = -strides[0], min(max(numbers[0] - draw(st.integers(-3, 3)), LEAST), MOST)
    parts = [draw(st.sampled_from([(1, 0), (1, 0), (3, 0), (1, 7), (4, 5)])) for _ in numbers]
    terms = tuple(Term(n, stride, *part) for n, (stride, part) in enumerate(zip(strides, parts, strict=True)))
    return Position(terms, draw(st.integers(-9, 9) | NUMBERS | st.integers(-(2**61), 2**61))), numbers


def exact(position: Position, numbers: list[int]) -> int:
    return position.const + sum(term.stride * term.digit(numbers[term.operand]) for term in position.terms)


CANCELS = Position((Term(0, 1 << 20), Term(1, -(1 << 20))), 3), [2 * 10**9, 2 * 10**9 - 1]
BACK = Position((Term(0, 2**31), Term(1, -(2**31))), 5), [MOST, MOST]
AROUND = Position((Term(0, 2**31), Term(1, 2**31)), 5), [MOST, 1]


@pytest.mark.parametrize("known", [False, True])
@settings(max_examples=60, deadline=None)
@given(case=positions())
@example(CANCELS)
@example(BACK)
@example(AROUND)
def test_a_position_is_exact_or_far(known: bool, case: tuple[Position, list[int]]) -> None:
    position, numbers = case
    intervals = [Interval(n, n) if known else None for n in numbers]
    found = int(locate(position, [jnp.int32(n) for n in numbers], intervals))
    wanted = exact(position, numbers)
    assert found == (wanted if -FAR <= wanted < FAR else FAR)


@settings(max_examples=60, deadline=None)
@given(case=positions(), length=st.sampled_from([1, 20, 2**30, LONGEST_INT32]), size=st.sampled_from([1, 8, 2**20]))
@example(CANCELS, 20, 8)
@example(BACK, 20, 8)
@example(AROUND, LONGEST_INT32, 8)
@example((Position((Term(0, 1),), MOST), [MOST]), LONGEST_INT32, 8)
def test_each_lane_is_exact_or_out_of_bounds(case: tuple[Position, list[int]], length: int, size: int) -> None:
    position, numbers = case
    first = index(position, [jnp.int32(n) for n in numbers], [None] * len(numbers), length, size)
    start = exact(position, numbers)
    for lane in {0, 1 % size, size // 2, size - 1}:
        found, wanted = int(first + jnp.int32(lane)), start + lane
        assert found == wanted if 0 <= wanted < length else not 0 <= found < length


@given(number=st.integers(-(2**70), 2**70))
def test_numbers_modulo_two_to_the_32(number: int) -> None:
    assert (int(wrapped(number)) - number) % 2**32 == 0


@tk.kernel(out_type=lambda x, a, b: x)
def between(x: Any, a: Any, b: Any, out: Any, *, stride: int) -> None:
    """Element i of x, moved by what two scalars are apart."""
    i = tk.parallel(x.shape[0], 4)
    out[i] = x.load(tk.ds(stride * a[()] - stride * b[()] + i.start, 4), fill=-1)


@pytest.mark.parametrize("stride", [1, 5, 1 << 20])
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"])
def test_differences_of_large_scalars_do_not_wrap(target: str, stride: int) -> None:
    if target == "cuda:sm_90":
        pytest.importorskip("triton", reason="needs triton")
    x, scalar = np.arange(10, dtype=np.int32), np.zeros((), np.int32)
    traced = between.trace(x, scalar, scalar, stride=stride)
    lowered = traced.lower(target)
    run = lowered.compile() if target.startswith("cpu") else lowered.interpret
    for a, b in ((2 * 10**9, 10**9), (MOST, MOST - 3), (LEAST, MOST), (10**9, 10**9 - 1)):
        wanted = [p if 0 <= (p := i + stride * (a - b)) < 10 else -1 for i in range(10)]
        arrays = x, np.array(a, np.int32), np.array(b, np.int32)
        np.testing.assert_array_equal(run(*arrays), wanted)
        np.testing.assert_array_equal(tk.interpret(traced)(*arrays), wanted)
