"""The loops that are unrolled, and by which factor."""

from __future__ import annotations

from typing import Any

import pytest

from tilekern.ir.analysis.ranges import analyze
from tilekern.ir.control import Fold
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.plan.unroll import Unrolling, trip_count, unrolling_of

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

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
        ("?", None, Unrolling(2)),
        ("2048", 16, Unrolling(4)),
        ("5000", 16, Unrolling(4)),  # a bound behind the end
        ("1664", 13, Unrolling(2)),
        ("512", 4, Unrolling(4, False)),
        ("300", 3, Unrolling(3, False)),
        ("128", 1, Unrolling(1, False)),
        ("0", 0, Unrolling(1, False)),
    ],
)
def test_loops_whose_dots_wait_are_written_out(body: str, stop: str, tiles: int | None, expected: Unrolling) -> None:
    op, ranges = fold(body, stop)
    assert trip_count(op, ranges) == tiles
    assert unrolling_of(op, ranges) == expected


def test_sums_of_products_are_not() -> None:
    """The matrix units are busy all the time."""
    assert unrolling_of(*fold(SUM, "2048")) == unrolling_of(*fold(SUM, "?")) == Unrolling()
