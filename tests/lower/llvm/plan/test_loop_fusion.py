"""Plans of kernels: the number of passes over memory, the tiles that are materialised, the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.library import CASES, family
from tests.lower.llvm.machines import ALL, AVX2, AVX512, BFLOAT16
from tests.lower.llvm.plans import every_step, planned, words
from tilekern.ir.control import Fold
from tilekern.lower.llvm.plan.steps import BufferCopies, LoopNest, Plan, Step
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.target import TARGETS

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


def kernel(function: Callable[..., Any], *shapes: tuple[int, ...], out: tuple[int, ...] | None = None) -> Any:
    """The Func of a kernel of float32 arrays."""
    made = tk.kernel(out_type=lambda x, *_: jax.ShapeDtypeStruct(out or x.shape, x.dtype))(function)
    return made.trace(*(np.zeros(shape, np.float32) for shape in shapes)).lower("cpu:xla").ir


def steps(function: Callable[..., Any], *shapes: tuple[int, ...], **more: Any) -> list[str]:
    """The plan in words, without scalars."""
    found = words(*planned(kernel(function, *shapes, **more), AVX512))
    return [line for line in found if not line.endswith("i32[]")]


def library(name: str, dtype: str, machine: Machine) -> tuple[Plan, list[str]]:
    """The plan of a kernel of the library for its first case."""
    legal, plan = planned(family(name, CASES[name][0].name, dtype).func(TARGETS["cpu:llvm"]), machine)
    return plan, words(legal, plan)


# --- golden ----------------------------------------------------------------------------------------------------------


def test_what_is_computed_once_is_not_kept() -> None:
    def f(x, y, out):
        i = tk.parallel(64, 16)
        out[i] = jnp.exp(x[i] * 2 + y[i]).T.T

    assert steps(f, (64, 32), (64, 32)) == ["for [16, 32]: store out"]


def test_a_row_and_its_sum() -> None:
    def f(x, out):
        i = tk.parallel(64, 16)
        out[i] = x[i] / x[i].sum(axis=1, keepdims=True)

    assert steps(f, (64, 32)) == ["for [16, 32]: sum", "for [16, 32]: store out"]


def test_a_softmax_computes_each_exponential_once() -> None:
    def f(x, out):
        i = tk.parallel(64, 16)
        e = jnp.exp(x[i] - x[i].max(axis=1, keepdims=True))
        out[i] = e / e.sum(axis=1, keepdims=True)

    expected = ["for [16, 32]: max", "for [16, 32]: keep f32[16, 32] sum", "for [16, 32]: store out"]
    assert steps(f, (64, 32)) == expected


def test_overlapping_slices_read_a_costly_tile_that_is_kept() -> None:
    def overlapping(x, out):
        y = jnp.exp(x[...])
        out[...] = y[:-1] + y[1:]

    def apart(x, out):
        y = jnp.exp(x[...])
        out[...] = y[:8] + y[8:]

    assert steps(overlapping, (16, 32), out=(15, 32)) == ["for [16, 32]: keep f32[16, 32]", "for [15, 32]: store out"]
    assert steps(apart, (16, 32), out=(8, 32)) == ["for [8, 32]: store out"]


def test_a_costly_tile_is_kept_by_loops_over_all_of_it() -> None:
    def column(x, out):
        i = tk.parallel(64, 16)
        y = jnp.exp(x[i])
        out[i] = y - y[:, :1]

    def half(x, out):
        y = jnp.exp(x[...])
        out[...] = jnp.repeat(y[:8], 2, 0) * y

    kept = "for [16, 32]: keep f32[16, 32]"
    assert steps(column, (64, 32)) == [kept, "for [16, 1]: keep f32[16, 1]", "for [16, 32]: store out"]
    assert steps(half, (16, 32))[0] == kept


def test_two_reductions_of_one_tile_are_one_pass() -> None:
    def f(x, out):
        i = tk.parallel(64, 16)
        tile = x[i]
        out[i] = tile.sum(axis=1) + (tile * tile).sum(axis=1) + tile.max(axis=1)

    assert steps(f, (64, 32), out=(64,)) == ["for [16, 32]: sum sum max", "for [16]: store out"]


def test_a_sum_of_dots_is_added_up_in_place() -> None:
    def f(x, y, out):
        i = tk.parallel(64, 16)

        def body(k, total):
            return total + x[i, k] @ y[k]

        out[i] = tk.fold(tk.serial(96, 32), body, jnp.zeros((16, 48), jnp.float32))

    assert steps(f, (64, 96), (96, 48), out=(64, 48)) == [
        "for [16, 48]: keep f32[16, 48]",
        "fold f32[16, 48]",
        "  dot f32[16, 48] added",
        "for [16, 48]: store out",
    ]


def test_carries_that_change_places_are_copied() -> None:
    def f(x, out):
        i = tk.parallel(64, 16)
        a, b = tk.fold(tk.serial(3), lambda _, c: (c[1], c[0] + 1), (x[i], x[i] * 2))
        out[i] = a - b

    found = steps(f, (64, 32))
    assert found[-2].startswith("  copy 2048") and found[-1] == "for [16, 32]: store out"


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ALL, ids=lambda m: m.cpu)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_keeps_no_copy_of_its_accumulator(dtype: str, machine: Machine) -> None:
    plan, lines = library("flash_attention", dtype, machine)
    assert not [line for line in lines if "copy" in line]
    folds = [step for step in every_step(plan) if isinstance(step, Step) and isinstance(step.op, Fold)]
    assert folds
    for fold in folds:
        inner = plan.steps[fold.op.body]
        scores, values = (s for s in inner if isinstance(s, Step) and s.op.name == "dot")
        assert values.accumulates and not scores.accumulates
        carried = {buffer.root for buffer in plan.carry_buffers[fold.op] if buffer is not None}
        assert {buffer.root for _, buffer in values.produces} <= carried
        # The exponentials take the place of the scores, unless they are narrower.
        (place,) = {buffer.root for _, buffer in scores.produces}
        kept = [
            m
            for s in inner
            if isinstance(s, LoopNest)
            for m in s.maps
            if m.value.tile.shape == scores.op.result.tile.shape
        ]
        own = [m.buffer.root for m in kept if m.value.tile.dtype == scores.op.result.tile.dtype]
        assert all(root is place or root in carried for root in own)  # the accumulator may have the same shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_softmax_of_the_library_keeps_one_tile(dtype: str) -> None:
    plan, _ = library("softmax", dtype, AVX512)
    kept = [m.value.tile for s in every_step(plan) if isinstance(s, LoopNest) for m in s.maps]
    assert len([t for t in kept if len(t.shape) > 1]) <= 1
    assert len([s for s in every_step(plan) if isinstance(s, LoopNest) and len(s.space) > 1]) <= 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_keeps_rows_of_numbers_at_most(dtype: str) -> None:
    plan, _ = library("rms_norm", dtype, AVX2)
    assert plan.scratch <= 4096


@pytest.mark.parametrize(("dtype", "machine"), [("float32", AVX2), ("float32", AVX512), ("bfloat16", BFLOAT16)])
def test_a_matmul_copies_its_right_operand_only(dtype: str, machine: Machine) -> None:
    plan, lines = library("matmul", dtype, machine)
    assert not [line for line in lines if "copy" in line]
    (dot,) = (s for s in every_step(plan) if isinstance(s, Step) and s.op.name == "dot")
    assert dot.accumulates and not dot.packing.packs_left
    assert not [
        s for s in every_step(plan) if isinstance(s, BufferCopies) and any(a.root is not b.root for a, b in s.moves)
    ]
