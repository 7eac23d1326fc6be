"""The verifier of plans finds every kind of fault that a plan can have, without running a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.machines import AVX2
from tests.lower.llvm.plans import every_step, planned
from tilekern.errors import PlanError
from tilekern.ir.core import Func
from tilekern.ir.memory import Store
from tilekern.lower.llvm import element_index
from tilekern.lower.llvm.element_index import ElementMap
from tilekern.lower.llvm.gemm.dots import Packing
from tilekern.lower.llvm.plan.buffers import _OffsetAssigner
from tilekern.lower.llvm.plan.steps import Buffer, BufferCopies, LoopNest, Map, Plan, Step
from tilekern.lower.llvm.plan.verify_plan import verify_plan

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


def _func(body: Callable[..., None], *arrays: Any) -> Func:
    kernel = tk.kernel(out_type=lambda x, *_: jax.ShapeDtypeStruct(x.shape, x.dtype))(body)
    return kernel.trace(*arrays).lower("cpu:xla").ir


X = np.ones((8, 32), np.float32)
WIDE = np.ones((2, 32), np.float64)


def relative(x, out) -> None:
    i = tk.parallel(x.shape[0], 4)
    v = jnp.exp(x[i])
    out[i] = v - v[:, :1]


def sorted_pairs(x, out) -> None:
    t = x[...]
    v = jnp.take_along_axis(t * t, jnp.argsort(t, 1), 1)
    out[...] = jnp.repeat(v[:, :16], 2, 1) + t / 8


def softmax(x, out) -> None:
    e = jnp.exp(x[...] - x[...].max(1, keepdims=True))
    out[...] = e / e.sum(1, keepdims=True)


def powers(x, w, out) -> None:
    def body(_, total):
        return tk.dot(jnp.exp(total), w[...], total)

    out[...] = tk.fold(tk.serial(3), body, x[...])


def exchanged(x, out) -> None:
    a, b = tk.fold(tk.serial(3), lambda _, c: (c[1], c[0]), (x[...], x[...] * 2))
    out[...] = a - b


def branches(x, out) -> None:
    v = jnp.exp(x[...]).cumsum(1)
    out[...] = jax.lax.cond(x[0, 0] > 0, lambda: v.cumsum(0), lambda: jnp.flip(v, 1).cumsum(0)) + v


def twice(x, out) -> None:
    out[:6] = x[:6]
    out[2:] = x[:6]


def _plan(body: Callable[..., None], *arrays: Any) -> tuple[Func, Plan]:
    return planned(_func(body, *(arrays or (X,))), AVX2)


def _fails(func: Func, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify_plan(func, plan)


# --- faults of the planner -------------------------------------------------------------------------------------------


def _compare_coordinates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lambda self, shape: self.coords == element_index._counters(len(self.domain))  # noqa: E731
    monkeypatch.setattr(ElementMap, "is_identity_of", alone)


def test_a_tile_computed_by_loops_over_a_part_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    func = _func(relative, X)
    verify_plan(*planned(func, AVX2))
    _compare_coordinates_alone(monkeypatch)
    _fails(*planned(func, AVX2), r"loops compute a part of a tile\n.*expected: loops over \[4, 32\] for f32\[4, 32\]")


def test_a_tile_computed_over_elements_that_are_still_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        func = _func(sorted_pairs, WIDE)
    verify_plan(*planned(func, AVX2))
    _compare_coordinates_alone(monkeypatch)
    message = r"a loop nest over \[2, 16\] overwrites a tile that it still reads\n  expected: i32\[2, 32\] read at byte"
    _fails(*planned(func, AVX2), message)


def test_a_live_range_that_ends_with_the_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortest(self: _OffsetAssigner, buffer: Buffer, uses: Any) -> None:
        buffer.first_use = buffer.last_use = min(use.number for use in uses.writes)

    func = _func(softmax, X)
    monkeypatch.setattr(_OffsetAssigner, "_set_live_range", shortest)
    _fails(*planned(func, AVX2), "not in memory|still reads|two tiles")


def test_a_live_range_that_ends_inside_of_a_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(x, out) -> None:
        v = jnp.exp(x[...]).cumsum(1)
        out[...] = tk.fold(tk.serial(3), lambda _, c: (c * v).cumsum(1).cumsum(0).cumsum(1), x[...])

    def without_loops(self: _OffsetAssigner, buffer: Buffer, uses: Any) -> None:
        numbers = [use.number for use in (*uses.writes, *uses.reads)]
        buffer.first_use, buffer.last_use = min(numbers), max(numbers)

    func = _func(kept, X)
    verify_plan(*planned(func, AVX2))
    monkeypatch.setattr(_OffsetAssigner, "_set_live_range", without_loops)
    _fails(*planned(func, AVX2), r"not in memory\n.*\n  got: overwritten by fold, whose steps write there")


def test_carries_that_are_overwritten_before_they_are_copied_are_found() -> None:
    func, plan = _plan(exchanged)
    verify_plan(func, plan)
    (fold,) = _steps(plan, "fold")
    inner = plan.steps[fold.op.regions[0]]
    first, second = plan.carry_buffers[fold.op]
    assert first is not None and second is not None
    inner[:] = [BufferCopies([(second, first), (first, second)])]
    _fails(func, plan, r"the end of a block yields a tile that is not in memory\n.*\n  got: overwritten by a copy")


# --- faults of a plan ------------------------------------------------------------------------------------------------


def _steps(plan: Plan, name: str) -> list[Step]:
    return [step for step in every_step(plan) if isinstance(step, Step) and step.op.name == name]


def _nests(plan: Plan) -> list[LoopNest]:
    return [step for step in every_step(plan) if isinstance(step, LoopNest)]


def test_a_step_after_the_one_that_reads_its_tile_is_found() -> None:
    func, plan = _plan(softmax)
    steps = plan.steps[func.body]
    steps[-2:] = reversed(steps[-2:])
    _fails(func, plan, "a step reads a tile that no step computes|no earlier step writes it")


def test_a_tile_that_is_never_written_is_found() -> None:
    func, plan = _plan(softmax)
    nest = next(nest for nest in _nests(plan) if nest.maps)
    nest.maps.clear()
    _fails(func, plan, "a buffer holds a tile that no step writes")


@pytest.mark.parametrize("way", ["swapped", "lost", "doubled", "at once"])
def test_stores_in_another_order_are_found(way: str) -> None:
    func, plan = _plan(twice)
    verify_plan(func, plan)
    first, second = (nest for nest in _nests(plan) if nest.stores)
    moved: dict[str, tuple[list[Store], list[Store]]] = {
        "swapped": (second.stores, first.stores),
        "lost": (first.stores, []),
        "doubled": (first.stores, second.stores * 2),
        "at once": ([*first.stores, *second.stores], []),
    }
    first.stores, second.stores = moved[way]
    _fails(func, plan, r"accesses of out are not in the order of the ops\n  expected: store of line \d+, store of")


def test_a_branch_that_destroys_what_follows_reads_is_found() -> None:
    func, plan = _plan(branches)
    verify_plan(func, plan)
    kept = next(buffer for value, buffer in _steps(plan, "scan")[0].produces)
    (switch,) = _steps(plan, "switch")
    inner = next(step for step in plan.steps[switch.op.regions[1]] if isinstance(step, Step))
    for _, buffer in inner.produces:
        buffer.root.offset = kept.root.offset
    _fails(func, plan, "still reads|not in memory")


def test_a_sum_whose_addend_is_missing_is_found() -> None:
    func, plan = _plan(powers, X, np.ones((32, 32), np.float32))
    (dot,) = _steps(plan, "dot")
    assert dot.accumulates
    own = Buffer(dot.produces[0][1].nbytes, offset=plan.scratch)
    plan.scratch += own.nbytes
    dot.produces = [(value, own) for value, _ in dot.produces]
    _fails(func, plan, "the step of dot adds to a tile that is not in memory")


def test_memory_that_is_too_small_is_found() -> None:
    func, plan = _plan(powers, X, np.ones((32, 32), np.float32))
    plan.scratch -= 64
    _fails(func, plan, "a buffer is outside")
    func, plan = _plan(softmax)
    next(nest for nest in _nests(plan) if nest.maps).maps[0].buffer.nbytes -= 4
    _fails(func, plan, "a buffer has another size|not in memory")


def test_temporary_memory_that_is_too_small_is_found() -> None:
    func, plan = _plan(powers, X, np.ones((32, 32), np.float32))
    (dot,) = _steps(plan, "dot")
    dot.packing = Packing(packs_left=True, packs_right=True)
    dot.temporary = Buffer(4096, offset=plan.scratch)
    plan.scratch += 4096
    _fails(func, plan, "the step of dot lacks temporary memory\n  expected: 5120 bytes or more")


def test_an_operand_without_address_is_found() -> None:
    def scaled(x, w, out) -> None:
        out[...] = tk.dot(x[...], 2 * w[...])

    func, plan = _plan(scaled, X, np.ones((32, 32), np.float32))
    (dot,) = _steps(plan, "dot")
    dot.packing, dot.temporary = Packing(packs_left=False, packs_right=False), None
    _fails(func, plan, r"the step of dot reads an operand in place\n  expected: an address of f32\[32, 32\]")


def test_two_tiles_in_one_place_are_found() -> None:
    func, plan = _plan(softmax)
    nest = next(nest for nest in _nests(plan) if nest.maps)
    (value, _) = next((v, b) for v, b in nest.produces if v.tile.shape == (8,))
    nest.produces = [(v, nest.maps[0].buffer if v is value else b) for v, b in nest.produces]
    _fails(func, plan, "writes two tiles to one place")


def test_the_error_names_the_users_line() -> None:
    func, plan = _plan(softmax)
    nest = next(nest for nest in _nests(plan) if nest.maps)
    nest.maps.append(Map(nest.maps[0].value, Buffer(4)))
    with pytest.raises(PlanError) as error:
        verify_plan(func, plan)
    assert "in softmax" in str(error.value) and "report it with the kernel" in str(error.value)
