"""Outputs that pipelined loops write: each iteration writes its whole block, or the loop has no pipeline."""

from __future__ import annotations

import pytest

from tests.lower.mosaic.two_cores import assert_every_plan_agrees
from tilekern.ir.parse import parse


def two_halves(first: str, second: str) -> str:
    """Two loops over rows, each of which may store both halves of the columns."""

    def store(half: int) -> str:
        return f"store %v to %o[8*%k +: 8!, {128 * half} +: 128!]\n"

    def loop(halves: str) -> str:
        return f"""
          fold %k in k[24 by 8] from %z to %e do {{
            %u = load %x[8*%k +: 8!, {128 * int(halves[-1])} +: 128!] : f32[8, 128]
            %v = add(%u, %u) : f32[8, 128]
            {"".join(store(int(half)) for half in halves)}
          }}
        """

    return f"""
        func @f(%x: ref<f32[24, 256], in>, %o: ref<f32[24, 256], out>) {{
          %z = constant 0 : i32[]
          %e = constant 24 : i32[]
          {loop(first)}
          {loop(second)}
        }}
    """


@pytest.mark.parametrize(("first", "second", "pipelined"), [("0", "1", False), ("01", "1", False), ("01", "10", True)])
def test_a_block_of_which_an_iteration_writes_a_part_has_no_pipeline(first: str, second: str, pipelined: bool) -> None:
    assert ("pipelined" in assert_every_plan_agrees(parse(two_halves(first, second)))) == pipelined


def some_outside(rows: int) -> str:
    """Six stores of 8 rows, in the order 0, 2, 4, 1, 3, 5; of an array of 40 rows, the last one is outside."""
    return f"""
        func @f(%x: ref<f32[48, 128], in>, %o: ref<f32[{rows}, 128], out>) {{
          %z = constant 0 : i32[]
          %e = constant 48 : i32[]
          fold %k in k[48 by 8] from %z to %e do {{
            %u = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
            %v = add(%u, %u) : f32[8, 128]
            store %v to %o[16*(%k % 3) + 8*(%k // 3) +: 8, 0 +: 128!]
          }}
        }}
    """


@pytest.mark.parametrize(("rows", "pipelined"), [(40, False), (48, True)])
def test_a_loop_that_stores_outside_of_the_array_has_no_pipeline(rows: int, pipelined: bool) -> None:
    assert ("pipelined" in assert_every_plan_agrees(parse(some_outside(rows)))) == pipelined
