"""Buffers of carries: a loop shares the buffer of another one only where nothing else needs its carry."""

from __future__ import annotations

import pytest

from tests.lower.mosaic.two_cores import assert_every_plan_agrees
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel

FIRST = """
  %r = fold %k in k[24 by 8] from %z to %e with %c = %one do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = add(%1, %c) : f32[8, 128]
    yield %2
  } : f32[8, 128]"""

NEXT = """
  %NAME = fold %k in k[24 by 8] from %z to %e with %c = %INIT do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = sub(%1, %c) : f32[8, 128]
    yield %2
  } : f32[8, 128]"""


def following(name: str, init: str) -> str:
    """A loop that continues a carry."""
    return NEXT.replace("NAME", name).replace("INIT", init)


# Loops behind the first one, and the value that is stored; and the number of buffers.
PROGRAMS = {
    "one loop continues the carry": (following("s", "r"), "%s", 1),
    "three loops in a row": (following("s", "r") + following("t", "s"), "%t", 1),
    "two loops begin with one carry": (
        following("s", "r") + following("t", "r") + "\n  %q = sub(%s, %t) : f32[8, 128]",
        "%q",
        3,
    ),
    "an op behind the loop reads the carry": (
        following("s", "r") + "\n  %q = mul(%s, %r) : f32[8, 128]",
        "%q",
        2,
    ),
    "two carries begin with one": (
        """
  %s, %t = fold %k in k[24 by 8] from %z to %e with %c = %r, %d = %r do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = add(%1, %c) : f32[8, 128]
    %3 = sub(%1, %d) : f32[8, 128]
    yield %2, %3
  } : f32[8, 128], f32[8, 128]
  %q = mul(%s, %t) : f32[8, 128]""",
        "%q",
        3,
    ),
    "a loop in a loop begins with the carry in each iteration": (
        """
  %s = fold %k in k[24 by 8] from %z to %e with %c = %one do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = fold %j in j[24 by 8] from %z to %e with %d = %r do {
      %3 = load %x[8*%j +: 8!, 0 +: 128!] : f32[8, 128]
      %4 = sub(%3, %d) : f32[8, 128]
      %5 = add(%4, %1) : f32[8, 128]
      yield %5
    } : f32[8, 128]
    %6 = add(%c, %2) : f32[8, 128]
    yield %6
  } : f32[8, 128]""",
        "%s",
        3,
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_carry_that_is_used_again_keeps_its_buffer(name: str) -> None:
    loops, stored, _ = PROGRAMS[name]
    assert "pipelined" in assert_every_plan_agrees(parse(program(loops, stored)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_how_many_buffers_there_are(name: str) -> None:
    loops, stored, count = PROGRAMS[name]
    assert len(plan_kernel(parse(program(loops, stored)), CHIPS["tpu:v5e"]).scratch) == count


def program(loops: str, stored: str) -> str:
    """The loop that makes the first carry, the loops behind it, and a store."""
    return f"""
func @f(%x: ref<f32[24, 128], in>, %o: ref<f32[8, 128], out>) {{
  %z = constant 0 : i32[]
  %e = constant 24 : i32[]
  %one = constant 1.0 : f32[8, 128]{FIRST}{loops}
  store {stored} to %o[0 +: 8!, 0 +: 128!]
}}"""


def test_a_vector_keeps_its_form_where_a_loop_continues_it() -> None:
    # The first loop takes the vector as a column, the second one as a row.
    text = """
func @f(%x: ref<f32[24, 128], in>, %y: ref<f32[256, 128], in>, %o: ref<f32[8, 128], out>) {
  %z = constant 0 : i32[]
  %e = constant 24 : i32[]
  %f = constant 256 : i32[]
  %one = constant 1.0 : f32[128]
  %s = fold %k in k[256 by 128] from %z to %f with %c = %one do {
    %1 = load %y[128*%k +: 128!, 0 +: 128!] : f32[128, 128]
    %2 = broadcast(%c) {dims=[0]} : f32[128, 128]
    %3 = sub(%1, %2) : f32[128, 128]
    %4 = reduce(%3) {monoid="max", dims=[1]} : f32[128]
    yield %4
  } : f32[128]
  %r = fold %k in k[24 by 8] from %z to %e with %c = %s do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = broadcast(%c) {dims=[1]} : f32[8, 128]
    %3 = mul(%1, %2) : f32[8, 128]
    %4 = reduce(%3) {monoid="sum", dims=[0]} : f32[128]
    yield %4
  } : f32[128]
  %q = broadcast(%r) {dims=[1]} : f32[8, 128]
  store %q to %o[0 +: 8!, 0 +: 128!]
}"""
    assert "pipelined" in assert_every_plan_agrees(parse(text))
