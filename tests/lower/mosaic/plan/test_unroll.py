"""Which loops are written out several iterations at once, and that each iteration still runs once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.analysis.ranges import analyze
from tilekern.ir.control import Fold
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.plan.unroll import Rounds, loop, rounds_of, trips

MAXIMUM = """
    %7 = reduce(%6) {monoid="max", dims=[1]} : f32[128]
    %8 = broadcast(%7) {dims=[0]} : f32[128, 128]
    %9 = add(%8, %c) : f32[128, 128]
"""
SUM = "%9 = add(%6, %c) : f32[128, 128]"
TWO_DOTS = """
    %7 = dot(%6, %6) {contract=[[1], [0]], batch=[[], []], precision="ieee"} : f32[128, 128]
    %9 = add(%7, %c) : f32[128, 128]
"""


def fold(body: str, stop: str) -> tuple[Fold, Any]:
    """A loop over tiles of 128 of 2048, from 0 to `stop`, and what is known of integers around it."""
    func = parse(f"""func @f(%x: ref<f32[128, 2048], in>, %n: ref<i32[4], in>, %o: ref<f32[128, 128], out>) {{
  grid %i in i[4 by 1]
  %0 = constant 0 : i32[]
  {"%1 = load %n[%i!] : i32[]" if stop == "?" else f"%1 = constant {stop} : i32[]"}
  %2 = constant 0.0 : f32[128, 128]
  %3 = fold %k in k[2048 by 128] from %0 to %1 with %c = %2 do {{
    %4 = load %x[0 +: 128!, 128*%k +: 128!] : f32[128, 128]
    %5 = load %x[0 +: 128!, 0 +: 128!] : f32[128, 128]
    %6 = dot(%5, %4) {{contract=[[1], [0]], batch=[[], []], precision="ieee"}} : f32[128, 128]
    {body}
    yield %9
  }} : f32[128, 128]
  store %3 to %o[0 +: 128!, 0 +: 128!]
}}
""")
    (found,) = (op for op in func.walk() if isinstance(op, Fold))
    return found, analyze(func)


@pytest.mark.parametrize("body", [MAXIMUM, TWO_DOTS])
@pytest.mark.parametrize(
    ("stop", "tiles", "expected"),
    [
        ("?", None, Rounds(2)),
        ("2048", 16, Rounds(4)),
        ("5000", 16, Rounds(4)),  # a bound behind the end
        ("1664", 13, Rounds(2)),
        ("512", 4, Rounds(4, False)),
        ("300", 3, Rounds(3, False)),
        ("128", 1, Rounds(1, False)),
        ("0", 0, Rounds(1, False)),
    ],
)
def test_loops_whose_dots_wait_are_written_out(body: str, stop: str, tiles: int | None, expected: Rounds) -> None:
    op, ranges = fold(body, stop)
    assert trips(op, ranges) == tiles
    assert rounds_of(op, ranges) == expected


def test_sums_of_products_are_not() -> None:
    """The matrix units are busy all the time."""
    assert rounds_of(*fold(SUM, "2048")) == rounds_of(*fold(SUM, "?")) == Rounds()


def ran(first: Any, last: Any, count: int) -> tuple[Any, Any]:
    """A number that tells which iterations ran in which order, and how many did."""

    def body(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
        order, many = carried
        return order * 31 + jnp.uint32(i), many + 1

    order, many = loop(first, last, body, (jnp.uint32(0), jnp.int32(0)), count)
    return order, many


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.booleans())
def test_each_iteration_runs_once_in_order(first: int, last: int, count: int, known: bool) -> None:
    expected = 0
    for i in range(first, last):
        expected = (expected * 31 + i) % 2**32
    run: Any = ran if known else jax.jit(ran, static_argnums=2)
    order, many = run(np.int32(first), np.int32(last), count)
    assert (int(order), int(many)) == (expected, max(0, last - first))


def test_few_iterations_are_no_loop() -> None:
    def program(count: int, x: jax.Array) -> Any:
        def body(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
            return (carried[0] + x,)

        return loop(np.int32(0), np.int32(4), body, (x,), count)

    whole, half = (str(jax.make_jaxpr(partial(program, count))(jnp.zeros(()))) for count in (4, 2))
    assert "scan" not in whole and "while" not in whole
    assert "scan" in half
