"""The tally of what random programs hold, and that they hold all that is possible."""

from __future__ import annotations

from itertools import product

import pytest

from tilekern.ir.parse import parse
from tilekern.testing.programs.coverage import FACTS, PLACES, all_uses, drawn, facts_of, uses_of

RELATIVE = """
func @f(%x: ref<f32[8, 32], in>, %out: ref<f32[8, 32], out>) {
  grid %i in i[8 by 4]
  %0 = load %x[4*%i, 0] : f32[4, 32]
  %1 = exp(%0) : f32[4, 32]
  %2 = slice(%1) {start=[0, 0], stop=[4, 1], stride=[1, 1]} : f32[4, 1]
  %3 = broadcast(%2) {dims=[0, 1]} : f32[4, 32]
  %4 = sub(%1, %3) : f32[4, 32]
  store %4 to %out[4*%i, 0]
}
"""
PLACED = """
func @f(%x: ref<i32[10], in>, %out: ref<i32[10], out>) {
  grid %i in i[10 by 4]
  %0 = load %x[4*%i +: 4] : i32[4]
  %1 = iota() {dim=0} : i32[4]
  %2 = constant 4 : i32[]
  %3 = mul(%i, %2) : i32[]
  %4 = broadcast(%3) {dims=[]} : i32[4]
  %5 = add(%4, %1) : i32[4]
  %6 = constant 10 : i32[4]
  %7 = lt(%5, %6) : bool[4]
  %8 = load %x[gather(%5, 4)] mask %7 : i32[4]
  %9 = add(%0, %1) : i32[4]
  %10 = add(%8, %9) : i32[4]
  store %10 to %out[4*%i +: 4]
}
"""


def test_a_slice_beside_its_own_tile() -> None:
    found = {str(use) for use in uses_of(parse(RELATIVE.replace("[4*%i, 0]", "[4*%i +: 4, 0 +: 32]")))}
    assert found == {
        "smooth of load, same, one use",
        "arithmetic of smooth, same, several uses",
        "arithmetic of smooth, sliced from 0, several uses",
        "arithmetic of smooth, broadcast, several uses",
        "store of arithmetic, same, one use",
        "load of index, same, several uses",
        "store of index, same, several uses",
    }


def test_facts_and_where_they_go() -> None:
    found = facts_of(parse(PLACED))
    gathered = {(fact, "gather position") for fact in ("index", "indices", "arange", "size")}
    masked = {(fact, "mask") for fact in ("index", "indices", "arange", "size", "shape", "valid")}
    assert found == gathered | masked | {("arange", "grid axis")}


PAIRS = (("op", "relation"), ("producer", "relation"), ("op", "several"), ("producer", "several"))


def test_random_programs_have_each_pair() -> None:
    """A sample of the table: each op and each producer in each relation, with one use and with several."""
    table = drawn(400)
    for names in PAIRS:
        cells = {tuple(getattr(use, n) for n in names): False for use in all_uses() if not use.impossible}
        cells |= {tuple(getattr(use, n) for n in names): True for use in table.uses}
        assert not [cell for cell, is_drawn in cells.items() if not is_drawn], names
    assert not set(product(FACTS, PLACES)) - set(table.facts)
    assert not [use for use in table.uses if use.impossible]


@pytest.mark.slow
def test_random_programs_have_every_cell_that_is_possible() -> None:
    table = drawn(10_000)
    assert not table.missing
    assert not [use for use in table.uses if use.impossible]
