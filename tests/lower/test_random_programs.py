"""Thousands of random programs: the backends and the passes against the interpreter."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests import seeds
from tests.lower.llvm.machines import AVX2, AVX512, runs_here
from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tests.lower.mosaic.one_loop import OfSteps, OneLoop, in_two
from tilekern.errors import TargetError
from tilekern.ir.interpret import interpret
from tilekern.ir.verify import verify
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.xla import calibration
from tilekern.passes import pipeline
from tilekern.testing.fuzz.backends import compiled, outputs_of, simulated
from tilekern.testing.fuzz.modes import (
    NARROW,
    batched,
    by_interpreter,
    in_any_order,
    on_request,
    through_text,
)
from tilekern.testing.programs import Program, assert_agrees
from tilekern.testing.programs.batches import check, sample
from tilekern.testing.strategies import programs

# How many programs one test takes, the unit of work of a test process; fewer where XLA compiles them.
_CHUNK, _COMPILED_BY_XLA = 100, 50


def chunks(count: int) -> pytest.MarkDecorator:
    """So many chunks of programs; many more where time does not matter."""
    slow = (pytest.param(n, marks=pytest.mark.slow) for n in range(count, 5 * count))
    return pytest.mark.parametrize("chunk", [*range(count), *slow])


def seeds_of(chunk: int) -> range:
    return seeds.of_chunk(chunk, _CHUNK)


# --- the XLA backend -------------------------------------------------------------------------------------------------


@pytest.mark.sweep(12)
@chunks(12)
def test_the_xla_backend_agrees_with_the_interpreter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every other chunk as users' programs come, the others with small batches of programs, and without passes.
    optimize = chunk % 2 == 0
    if not optimize:
        monkeypatch.setattr(calibration, "BATCH_BYTES", 64)
    some = seeds.of_chunk(chunk, _COMPILED_BY_XLA)
    check(some, partial(outputs_of, mode="cpu:xla" if optimize else "cpu:xla without passes"))


# --- the LLVM backend ------------------------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@chunks(6)
def test_llvm_code_agrees_with_the_interpreter(chunk: int) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    check(seeds_of(chunk), partial(outputs_of, mode="cpu:llvm"))


def on_machine(programs: Sequence[Program], machine: Machine) -> Sequence[Sequence[np.ndarray]]:
    """The outputs by code for a CPU that may be less than this one."""
    return compiled([LlvmLowering(pipeline.run(p.func), machine).run for p in programs], programs)


# Fewer programs: what other CPUs do in a way of their own is little.
_OTHERS = 100


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", [AVX2, AVX512], ids=lambda m: m.cpu)
@chunks(1)
def test_llvm_code_for_lesser_machines_agrees_with_the_interpreter(chunk: int, machine: Machine) -> None:
    if not runs_here(machine):
        pytest.skip(f"needs a CPU that runs code for {machine.cpu}")
    check(seeds.of_chunk(chunk, _OTHERS), partial(on_machine, machine=machine))


# --- the Triton backend ----------------------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@chunks(6)
def test_triton_source_agrees_with_the_interpreter(chunk: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check(seeds_of(chunk), partial(outputs_of, mode="cuda:sm_90"))


@chunks(1)
def test_triton_compiles_random_programs(chunk: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    chip = CHIPS["cuda:sm_90"]
    for seed in list(seeds_of(chunk))[::10]:
        with contextlib.suppress(TargetError):
            compile_program(build(pipeline.run(sample(seed)[0].func), chip, {}), chip)


# --- the Mosaic backend -----------------------------------------------------------------------------------------------

# Pallas' interpreter makes large programs, which take time to compile.
_INTERPRETED, _WITH_LOOPS = 20, 12


@pytest.mark.sweep(6)
@chunks(6)
def test_mosaic_kernels_agree_with_the_interpreter(chunk: int) -> None:
    check(seeds.of_chunk(chunk, _INTERPRETED), partial(outputs_of, mode="tpu"), dtypes=NARROW)


def by_mosaic_in_every_form(programs: Sequence[Program], seen: Counter[str]) -> Sequence[Sequence[np.ndarray]]:
    """Some output that is wrong, if one of the forms of a program with a loop gives it, or those that are right."""
    many: list[tuple[MosaicLowering, Program]] = []
    for program in programs:
        for func in (program.func, in_two(program.func)):
            forms = [f for f in every_plan(pipeline.run(func)) if kind_of_plan(f.planned) != "resident"]
            seen.update(kind_of_plan(f.planned) for f in forms)
            many += [(f, program) for f in forms]
    outputs: dict[Program, Sequence[np.ndarray]] = {p: p.expected for p in programs}
    results = simulated([f for f, _ in many], [p for _, p in many], mode="tpu")
    for (_, program), found in zip(many, results, strict=True):
        if not agrees(program, found):
            outputs[program] = found
    return [outputs[p] for p in programs]


def agrees(program: Program, outputs: Sequence[np.ndarray]) -> bool:
    try:
        assert_agrees(program, outputs)
    except AssertionError:
        return False
    return True


@pytest.mark.sweep(4)
@chunks(4)
def test_mosaic_kernels_with_loops_in_the_grid_agree_with_the_interpreter(chunk: int) -> None:
    seen = Counter[str]()
    backend = partial(by_mosaic_in_every_form, seen=seen)
    some = seeds.of_chunk(chunk, _WITH_LOOPS)
    check(some[3:], backend, dtypes=NARROW, make=OneLoop)
    check(some[:3], backend, dtypes=NARROW, make=OfSteps)
    assert min(seen[form] for form in ("grid_loop", "step_table", "pipelined")) >= 1, seen


# --- the passes ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("improve", [partial(pipeline.run, check=True), on_request, through_text])
@chunks(2)
def test_the_meaning_stays(chunk: int, improve: Any) -> None:
    check(seeds_of(chunk), partial(by_interpreter, change=improve))


@pytest.mark.sweep(2)
@chunks(2)
def test_programs_may_run_in_any_order(chunk: int) -> None:
    check(seeds_of(chunk), in_any_order)


@pytest.mark.sweep(2)
@chunks(2)
def test_a_batch_is_as_many_runs(chunk: int) -> None:
    check(seeds_of(chunk), batched)


# --- the programs themselves -----------------------------------------------------------------------------------------


@given(program=programs())
@settings(max_examples=20)
def test_hypothesis_makes_programs_too(program: Program) -> None:
    verify(program.func)
    assert_agrees(program, interpret(pipeline.run(program.func), *program.arrays))
