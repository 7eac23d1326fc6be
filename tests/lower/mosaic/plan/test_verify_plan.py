"""The verifier of plans: it passes all plans, and finds each fault that is planted in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lower.mosaic.every_plan import kind_of_plan
from tests.lower.mosaic.plan import test_pipelined_loops, test_scratch_buffers
from tilekern.errors import PlanError
from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.plan import pipelined_loops
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.output_blocks import OutputBlocks
from tilekern.lower.mosaic.plan.plan_kernel import candidates
from tilekern.lower.mosaic.plan.verify_plan import verify_plan

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


def plan_of(func: Func | str, form: str = "resident") -> KernelPlan:
    """The candidate plan of a form."""
    func = parse(func) if isinstance(func, str) else func
    plans = {kind_of_plan(plan): plan for plan in candidates(legalize(func, "v5e"), CHIPS["tpu:v5e"])}
    return plans[form]


def loops(name: str) -> str:
    body, stored, _ = test_scratch_buffers.PROGRAMS[name]
    return test_scratch_buffers.program(body, stored)


# A product of two tiles of rows, of which one does not change along the loop; and the same with other places of blocks.
SUM = """
func @f(%x: ref<f32[16, 128], in>, %y: ref<f32[32, 128], in>, %o: ref<f32[16, 128], ROLE>) {
  grid %i in i[16 by 8], %j in j[32 by 8]
  %1 = load %x[8*%i +: 8!, 0 +: 128!] : f32[8, 128]
  %2 = load %y[8*%j +: 8!, 0 +: 128!] : f32[8, 128]
  %3 = mul(%1, %2) : f32[8, 128]
  WRITE %3 to %o[8*%i +: 8!, 0 +: 128!] KIND
}"""
ADDED = SUM.replace("ROLE", "sum").replace("WRITE", "atomic").replace("KIND", '{kind="add"}')

SOME_TILES = """
func @f(%x: ref<f32[40, 128], in>, %n: ref<i32[2], in>, %o: ref<f32[40, 128], zeros>) {
  %start = load %n[0] : i32[]
  %stop = load %n[1] : i32[]
  fold %k in k[40 by 8] from %start to %stop do {
    %u = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %v = exp(%u) : f32[8, 128]
    store %v to %o[8*%k +: 8!, 0 +: 128!]
  }
}"""

# The first tile is added in each step.
KEPT = """
func @f(%x: ref<f32[40, 128], in>, %o: ref<f32[8, 128], out>) {
  %z = constant 0 : i32[]
  %e = constant 40 : i32[]
  %one = constant 1.0 : f32[8, 128]
  %u = load %x[0 +: 8!, 0 +: 128!] : f32[8, 128]
  %w = exp(%u) : f32[8, 128]
  %r = fold %k in k[40 by 8] from %z to %e with %c = %one do {
    %1 = load %x[8*%k +: 8!, 0 +: 128!] : f32[8, 128]
    %2 = mul(%1, %w) : f32[8, 128]
    %3 = add(%2, %c) : f32[8, 128]
    yield %3
  } : f32[8, 128]
  store %r to %o[0 +: 8!, 0 +: 128!]
}"""

# Half of the blocks of the output are of no program.
EVEN_BLOCKS = """
func @f(%x: ref<f32[16, 128], in>, %o: ref<f32[32, 128], zeros>) {
  grid %i in i[16 by 8]
  %1 = load %x[8*%i +: 8!, 0 +: 128!] : f32[8, 128]
  store %1 to %o[16*%i +: 8!, 0 +: 128!]
}"""


def in_one_buffer(name: str) -> KernelPlan:
    plan = plan_of(loops(name))
    return replace(plan, scratch_index=dict.fromkeys(plan.scratch_index, 0))


def with_wrong_buffer_shape() -> KernelPlan:
    plan = plan_of(KEPT)
    return replace(plan, scratch=tuple(replace(s, shape=(8, 64)) for s in plan.scratch))


def without_ops_before() -> KernelPlan:
    plan = plan_of(KEPT, "grid_loop")
    assert plan.grid_loop is not None
    return replace(plan, grid_loop=replace(plan.grid_loop, before=()))


def without_carries() -> KernelPlan:
    return replace(plan_of(KEPT, "grid_loop"), scratch_index={})


def with_layouts_exchanged() -> KernelPlan:
    func = parse("""
        func @f(%x: ref<f32[16, 128], in>, %o: ref<f32[16, 128], out>) {
          grid %i in i[8 by 8], %j in j[8 by 8]
          %1 = load %x[8*%i +: 8!, 0 +: 128!] : f32[8, 128]
          %2 = load %x[8*%j + 8 +: 8!, 0 +: 128!] : f32[8, 128]
          store %1 to %o[8*%i +: 8!, 0 +: 128!]
          store %2 to %o[8*%j + 8 +: 8!, 0 +: 128!]
        }
    """)
    plan = plan_of(func)
    first, second, *others = plan.layouts.items()
    layouts = {first[0]: second[1], second[0]: first[1], **dict(others)}
    return replace(plan, layouts=layouts)


def with_axes_exchanged() -> KernelPlan:
    plan = plan_of(ADDED)
    return replace(plan, order=plan.order[::-1])


def with_fetched_array_elsewhere() -> KernelPlan:
    plan = plan_of(KEPT, "pipelined")
    return replace(plan, pipelines={fold: replace(p, inputs=()) for fold, p in plan.pipelines.items()})


PLANTS: dict[str, tuple[Callable[[], KernelPlan], str]] = {
    "a carry is overwritten before a loop begins with it": (
        lambda: in_one_buffer("two loops begin with one carry"),
        "a loop begins with what a buffer does not hold",
    ),
    "two carries share a buffer": (
        lambda: in_one_buffer("two carries begin with one"),
        "a loop begins with what a buffer does not hold",
    ),
    "an inner loop overwrites the outer one's carry": (
        lambda: in_one_buffer("a loop in a loop begins with the carry in each iteration"),
        "what a buffer does not hold",
    ),
    "a buffer is too small": (with_wrong_buffer_shape, "a buffer has another type than its value"),
    "a step computes nothing again": (without_ops_before, "a step uses a value of another step"),
    "a grid loop keeps no carries": (without_carries, "a step keeps no carry"),
    "two windows are exchanged": (with_layouts_exchanged, "an access is outside of its window"),
    "the axes are in another order": (with_axes_exchanged, "a block of o returns"),
    "a loop fetches nothing": (with_fetched_array_elsewhere, "a block in HBM is read"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, message = PLANTS[name]
    with pytest.raises(PlanError, match=message):
        verify_plan(plant())


@pytest.mark.parametrize(
    ("text", "form", "name", "fault", "message"),
    [
        (ADDED, "resident", "semantics", property(lambda _: ("parallel", "parallel")), "cores share a block of o"),
        (SOME_TILES, "grid_loop", "skips_dead_steps", lambda *_: True, "dead steps have another block of o"),
        (EVEN_BLOCKS, "resident", "zeroed_outputs", (), "blocks of o are never initialised"),
    ],
)
def test_a_fault_of_a_kernel_plan_is_found(
    text: str, form: str, name: str, fault: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(text, form)
    verify_plan(plan)
    monkeypatch.setattr(KernelPlan, name, fault)
    with pytest.raises(PlanError, match=message):
        verify_plan(plan)


def test_a_block_that_is_initialised_in_each_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(ADDED)
    monkeypatch.setattr(OutputBlocks, "moving_axes", lambda *_: (True, True))
    with pytest.raises(PlanError, match="a block of o is not initialised once"):
        verify_plan(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (test_pipelined_loops.two_halves("0", "1"), "an iteration leaves out elements of o"),
        (test_pipelined_loops.some_outside(40), "a block of o is not written"),
    ],
)
def test_a_pipeline_that_writes_blocks_in_part_is_found(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined_loops, "_is_block_output", lambda *_: True)
    with pytest.raises(PlanError, match=message):
        verify_plan(plan_of(text, "pipelined"))
