"""Kernels of the library on two simulated cores: no race, no index out of bounds, nothing read that nobody wrote.

Pallas' TPU interpreter runs them on small shapes, in every way in which the planner would run them. It has the cores
share out the steps of parallel axes, orders nothing that semaphores do not order, and fills memory with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tests.lower.mosaic.two_cores import TWO_CORES, Call, on_two_cores
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.kernel import dispatch
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.matmul import matmul
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.rope import rope
from tilekern.kernels.softmax import softmax
from tilekern.kernels.swiglu import swiglu
from tilekern.lower.mosaic import call as caller
from tilekern.lower.mosaic.emit import emit_pallas
from tilekern.lower.mosaic.emit.index_maps import GridStep
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.target import TARGETS
from tilekern.passes import pipeline


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """An error leaves the interpreter's memory as it was."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def calls_of(function: Callable[[], Any]) -> list[Call]:
    """The calls of kernels that a function makes on a TPU."""
    found: list[Call] = []

    def record(func: Func, *arrays: Any) -> tuple[Array, ...]:
        found.append(Call(func, tuple(map(np.asarray, arrays))))
        return interpret(func, *found[-1].arrays, orders=1)

    def run(lowering: MosaicLowering, *inputs: Any) -> Any:
        types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in lowering.func.outputs]
        return jax.pure_callback(partial(record, lowering.func), types, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "on_platform", lambda *_: TARGETS["tpu:v5e"])
        patch.setattr(MosaicLowering, "run", run)
        jax.clear_caches()
        jax.block_until_ready(function())
    jax.clear_caches()
    return found


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def integers(*numbers: int) -> Array:
    return np.asarray(numbers, np.int32)


ROWS = {"block_rows": 2, "block_columns": 8}
PRODUCT = {"block_m": 8, "block_n": 8, "block_k": 8}
ATTENTION = {"block_q": 8, "block_k": 8, "return_logsumexp": True}
LOSS = {"block_t": 8, "block_v": 8, "block_d": 8}

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "matmul": (lambda: matmul(normal(20, 21), normal(21, 12), **PRODUCT), "resident grid_loop pipelined"),
    "matmul of nothing": (lambda: matmul(normal(20, 0), normal(0, 12), **PRODUCT), "resident"),
    "softmax": (lambda: softmax(normal(5, 21), **ROWS), "resident pipelined"),
    "layer_norm": (lambda: layer_norm(normal(5, 21), normal(21), normal(21), **ROWS), "resident pipelined"),
    "rms_norm": (lambda: rms_norm(normal(5, 21), normal(21), **ROWS), "resident pipelined"),
    "rope": (lambda: rope(normal(1, 10, 3, 8), block_t=4, block_n=2), "resident"),
    "swiglu": (lambda: swiglu(normal(5, 21), normal(5, 21), **ROWS), "resident"),
    "cross_entropy": (
        lambda: cross_entropy(normal(12, 20), normal(20, 21), integers(*range(11), -100), **LOSS),
        "resident grid_loop pipelined",
    ),
    "attention": (
        lambda: flash_attention(normal(1, 20, 2, 16), normal(1, 21, 1, 16), normal(1, 21, 1, 8), **ATTENTION),
        "resident grid_loop pipelined",
    ),
    "causal attention": (
        lambda: flash_attention(*[normal(1, 20, 2, 16)] * 3, causal=True, **ATTENTION),
        "resident step_table grid_loop pipelined",
    ),
    "attention to nothing at first": (
        lambda: flash_attention(*[normal(1, 20, 1, 16)] * 3, causal=True, q_offset=-9, **ATTENTION),
        "resident step_table grid_loop pipelined",
    ),
    "attention with offsets in an array": (
        lambda: flash_attention(*[normal(2, 20, 1, 16)] * 3, causal=True, q_offset=integers(3, -12), **ATTENTION),
        "resident pipelined grid_loop",
    ),
    "ragged_dot": (
        lambda: ragged_dot(normal(20, 12), normal(4, 12, 9), integers(0, 11, 0, 9), **PRODUCT),
        "resident pipelined grid_loop",
    ),
    "ragged_dot of nothing": (
        lambda: ragged_dot(normal(20, 12), normal(2, 12, 9), integers(0, 0), **PRODUCT),
        "resident pipelined grid_loop",
    ),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", CALLS)
def test_the_library_is_free_of_races(name: str) -> None:
    function, forms = CALLS[name]
    (call,) = calls_of(function)
    lowerings = list(every_plan(call.func))
    assert [kind_of_plan(lowering.planned) for lowering in lowerings] == forms.split()
    for lowering in lowerings:
        on_two_cores(lowering, call)


# --- what is planted is found ----------------------------------------------------------------------------------------

SUM = """
func @sum(%x: ref<f32[64, 128], in>, %o: ref<f32[8, 128], sum>) {
  grid %i in i[64 by 8]
  %1 = load %x[8*%i +: 8!, 0 +: 128!] : f32[8, 128]
  atomic %1 to %o[0 +: 8!, 0 +: 128!] {kind="add"}
}
"""

# The loop is longer than the array: its last two tiles are outside.
LONG_LOOP = """
func @long(%x: ref<f32[16, 128], in>, %o: ref<f32[8, 128], out>) {
  %0 = constant 0 : i32[]
  %1 = constant 32 : i32[]
  %2 = constant 1.0 : f32[8, 128]
  %3 = fold %k in k[32 by 8] from %0 to %1 with %c = %2 do {
    %4 = load %x[8*%k +: 8, 0 +: 128!] : f32[8, 128]
    %5 = sub(%4, %c) : f32[8, 128]
    yield %5
  } : f32[8, 128]
  store %3 to %o[0 +: 8!, 0 +: 128!]
}
"""


def call(text: str) -> Call:
    func = pipeline.run(parse(text))
    return Call(func, tuple(normal(*p.ref.shape) for p in func.inputs))


def in_form(func: Func, form: str) -> MosaicLowering:
    (found,) = (lowering for lowering in every_plan(func) if kind_of_plan(lowering.planned) == form)
    return found


def test_a_sum_over_programs_is_not_shared_out() -> None:
    one = call(SUM)
    lowering = in_form(one.func, "resident")
    assert lowering.planned.semantics == ("arbitrary",)
    on_two_cores(lowering, one)


def test_a_race_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = call(SUM)
    lowering = in_form(one.func, "resident")  # before the fault, which the verifier of plans would find, too
    monkeypatch.setattr(KernelPlan, "semantics", ("parallel",))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        on_two_cores(lowering, one)


@pytest.mark.parametrize("form", ["resident", "grid_loop", "pipelined"])
def test_tiles_that_do_not_exist_are_not_fetched(form: str) -> None:
    one = call(LONG_LOOP)
    on_two_cores(in_form(one.func, form), one)


@pytest.mark.parametrize("form", ["grid_loop", "pipelined"])
def test_a_tile_that_does_not_exist_would_be_found(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unclamped(found: Layout, step: GridStep) -> tuple[Any, ...]:
        tile = found.window.dims[0].operands
        return step.indices[tile[0]] if tile else 0, 0

    one = call(LONG_LOOP)
    for module in (emit_pallas, caller):
        monkeypatch.setattr(module, "block_index", unclamped)
    lowering = in_form(one.func, form)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds"):
        lowering.interpret(*one.arrays, params=TWO_CORES)


def test_a_read_of_what_was_never_written_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller._Kernel, "_initialize", lambda *_: None)
    one = call(SUM)
    with pytest.raises(AssertionError, match="NaN"):
        on_two_cores(in_form(one.func, "resident"), one)
