"""Partial sums: those that are stored, and those that are zeroed before."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given

from tests.ir.analysis.random_sums import sums, touched
from tests.lower.triton.running import program_of
from tilekern.ir.core import Func
from tilekern.ir.memory import Atomic
from tilekern.ir.parse import parse
from tilekern.ir.types import F32
from tilekern.lower.triton.plan.partial_sums import PartialSums, plan_partial_sums
from tilekern.lower.triton.program import Result

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


@given(func=sums())
def test_summands_are_stored_where_no_element_gets_two(func: Func) -> None:
    """And a partial sum is not zeroed before where each element gets one."""
    (total,) = func.outputs
    plan = plan_partial_sums(func, total)
    summands: Counter[tuple[Any, ...]] = Counter()
    for program in product(*(range(a.tiles) for a in func.axes)):
        partial = tuple(program[n] for n in plan.axes)
        numbers = dict(zip(func.body.args, program, strict=True))
        for op in func.walk():
            if isinstance(op, Atomic):
                summands.update((*partial, *at) for at in touched(op, numbers, total.ref.shape))
    assert not plan.stored or max(summands.values(), default=1) == 1, f"{func}"
    assert not plan.whole or len(summands) == plan.count(func) * prod(total.ref.shape), f"{func}"


LOOP = """
func @f(%x: ref<f32[32], in>, %n: ref<i32[1], in>, %o: ref<f32[4, 32], sum>) {{
  grid %i in i[3 by 1], %j in j[4 by 1]
  %first = constant 0 : i32[]
  %all = constant 32 : i32[]
  %some = load %n[0!] : i32[]
  fold %t in t[32 by 8] from %first to {stop} do {{
    %0 = load %x[8*%t +: 8!] : f32[8]
    {before}atomic %0 to %o[{at}] {{kind="add"}}
  }}
}}"""


@pytest.mark.parametrize(
    ("stop", "at", "stored", "whole"),
    [
        ("%all", "%j!, 8*%t +: 8!", True, True),
        ("%some", "%j!, 8*%t +: 8!", True, False),  # tiles that no iteration reaches are 0
        ("%all", "%j!, 16*%t +: 8", True, False),  # gaps
        ("%all", "%t!, 8*%t +: 8!", True, False),  # a diagonal; the programs of j have partial sums of their own
        ("%all", "%j!, 0 +: 8!", False, False),  # all iterations add to the same elements
        ("%all", "%j!, 4*%t +: 8", False, False),  # neighbours overlap
    ],
)
def test_summands_of_loops_are_stored_at_different_places(stop: str, at: str, stored: bool, whole: bool) -> None:
    func = parse(LOOP.format(stop=stop, at=at, before=""))
    axes = (0, 1) if "%t!" in at else (0,)
    assert plan_partial_sums(func, func.outputs[0]) == PartialSums(axes, stored, whole)
    program = program_of(func)
    assert program.results[0].zeroed == (not whole)
    assert ("tl.debug_barrier()" in program.text) == (not stored)


def test_two_additions_to_an_element_are_not_stored() -> None:
    twice = 'atomic %0 to %o[%j!, 8*%t +: 8!] {kind="add"}\n    '
    func = parse(LOOP.format(stop="%all", at="%j!, 8*%t +: 8!", before=twice))
    assert plan_partial_sums(func, func.outputs[0]) == PartialSums((0,))


def test_programs_next_to_each_other_share_a_partial_sum() -> None:
    func = parse("""
func @f(%x: ref<f32[96], in>, %o: ref<f32[96, 5], sum>) {
  grid %i in i[96 by 8], %j in j[5 by 1], %r in r[3 by 1]
  %0 = load %x[8*%i +: 8!] : f32[8]
  atomic %0 to %o[8*%i +: 8!, %j!] {kind="add"}
}""")
    assert plan_partial_sums(func, func.outputs[0]).axes == (2,)
    (result,) = program_of(func).results
    assert result == Result((3, 96, 5), F32, F32, partial_sums=True)


def test_programs_that_touch_each_other_have_partial_sums_of_their_own() -> None:
    """One update at a program's own elements and one at its neighbour's; each alone would need no partial sum."""
    func = parse("""
func @f(%x: ref<f32[96], in>, %o: ref<f32[96], sum>) {
  grid %i in i[96 by 8]
  %0 = load %x[8*%i +: 8!] : f32[8]
  atomic %0 to %o[8*%i +: 8!] {kind="add"}
  atomic %0 to %o[8*%i + 8 +: 8] {kind="add"}
}""")
    assert plan_partial_sums(func, func.outputs[0]).axes == (0,)


def test_neighbours_whose_tiles_overlap_have_partial_sums_of_their_own() -> None:
    """Tiles of 8 at steps of 4: each element is added to by two programs."""
    func = parse("""
func @f(%x: ref<f32[8], in>, %o: ref<f32[96], sum>) {
  grid %i in i[22 by 1]
  %0 = load %x[0 +: 8!] : f32[8]
  atomic %0 to %o[4*%i +: 8!] {kind="add"}
}""")
    assert plan_partial_sums(func, func.outputs[0]).axes == (0,)
