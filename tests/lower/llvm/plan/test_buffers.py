"""The scratch memory of a program: whoever reads a tile finds it there, and not another one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lower.library import CASES, family
from tests.lower.llvm.machines import ALL
from tests.lower.llvm.plans import every_step, planned
from tilekern.errors import PlanError
from tilekern.ir.parse import parse
from tilekern.lower.llvm.plan.steps import Buffer, BufferCopies
from tilekern.lower.llvm.plan.verify_plan import verify_plan
from tilekern.lower.target import TARGETS
from tilekern.passes import pipeline
from tilekern.testing.programs.batches import sample


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_random_programs(first: int) -> None:
    buffers = 0
    for seed in range(first, first + 100):
        func, plan = planned(pipeline.run(sample(seed)[0].func), ALL[seed % len(ALL)])
        buffers += plan.scratch > 0
        try:
            verify_plan(func, plan)
        except PlanError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert buffers > 25


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    for case in CASES[name][:3]:
        for machine in ALL:
            verify_plan(*planned(family(name, case.name, "bfloat16").func(TARGETS["cpu:llvm"]), machine))


UNREAD = """
func @f(%x: ref<i32[12], in>, %out: ref<i32[12], out>) {
  grid %i in i[12 by 2]
  %0 = constant 2 : i32[]
  %1 = rem(%i, %0) : i32[]
  %2 = constant true : bool[2]
  %3 = switch(%1) do {
    yield %2
  } do {
    yield %2
  } : bool[2]
  %4 = broadcast(%i) {dims=[]} : i32[2]
  %5 = constant 3 : i32[2]
  %6 = rem(%4, %5) : i32[2]
  %7 = constant 0 : i32[2]
  %8 = ne(%6, %7) : bool[2]
  %9 = load %x[2*%i +: 2] mask %8 : i32[2]
  %10 = and(%3, %8) : bool[2]
  %11 = sort(%9) {dim=0} : i32[2]
  %12 = sort(%9, %10) {dim=0, pick=1} : bool[2]
  %13 = select(%12, %11, %5) : i32[2]
  store %13 to %out[2*%i +: 2]
}
"""


def test_a_tile_that_is_never_read_leaves_the_buffer_of_an_operand_to_another() -> None:
    """The mask is stored for the loads of another loop nest, which compute it themselves."""
    for machine in ALL:
        verify_plan(*planned(parse(UNREAD), machine))


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype))
def nested_sum(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, reads_between: bool) -> None:
    """A sum over two loops; the inner one may read what the outer one began with."""
    i = tk.parallel(x.shape[0], 8)

    def outer(t: jax.Array, total: jax.Array) -> jax.Array:
        def inner(u: jax.Array, part: jax.Array) -> jax.Array:
            return tk.dot(total + w[u, :8] if reads_between else x[i], w[t + u], part)

        return tk.fold(tk.serial(3), inner, total)

    out[i] = tk.fold(tk.serial(3), outer, tk.zeros((i, x.shape[1])))


@pytest.mark.parametrize("reads_between", [False, True])
def test_a_sum_over_two_loops_is_copied_only_where_its_begin_is_read(reads_between: bool) -> None:
    x, w = np.ones((16, 16), np.float32), np.ones((5, 16, 16), np.float32)
    func = nested_sum.trace(x, w, reads_between=reads_between).lower("cpu:llvm").ir
    func, plan = planned(func, ALL[0])
    verify_plan(func, plan)
    moves = [move for step in every_step(plan) if isinstance(step, BufferCopies) for move in step.moves]
    assert any(a.root is not b.root for a, b in moves) == reads_between


def test_a_buffer_in_the_wrong_place_is_found() -> None:
    """Or else the tests above prove nothing."""
    func, plan = planned(family("flash_attention", "gpt2", "float32").func(TARGETS["cpu:llvm"]), ALL[0])
    moved = list(dict.fromkeys(buffer.root for step in every_step(plan) for _, buffer in step.produces))
    assert len(moved) > 3

    def is_found(buffer: Buffer, offset: int) -> bool:
        before, buffer.offset = buffer.offset, offset
        try:
            verify_plan(func, plan)
        except PlanError:
            return True
        finally:
            buffer.offset = before
        return False

    # In the place of some other buffer each one overlaps what is read later, but for the last one.
    found = sum(any(is_found(buffer, other.offset) for other in moved if other is not buffer) for buffer in moved)
    assert found >= len(moved) - 1
    verify_plan(func, plan)
