"""Thousands of random programs: the backends and the passes against the interpreter."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from tests.lower.llvm.machines import AVX2, AVX512, runs_here
from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tests.lower.mosaic.one_loop import OneLoop, in_two
from tests.programs import Program, assert_agrees, programs
from tests.programs.batches import check, sample
from tilekern.errors import TargetError
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import DTYPES
from tilekern.ir.verify import verify
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla import calibration
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.passes import pipeline
from tilekern.passes.batch import batch
from tilekern.passes.skew_carries import skew_carries
from tilekern.passes.split_loops import split_loops

# How many programs one test takes, the unit of work of a test process.
_CHUNK = 150


def chunks(count: int) -> pytest.MarkDecorator:
    """So many chunks of programs; many more where time does not matter."""
    slow = (pytest.param(n, marks=pytest.mark.slow) for n in range(count, 5 * count))
    return pytest.mark.parametrize("chunk", [*range(count), *slow])


# XLA compiles in half of the time without LLVM's optimisations, which are not what is under test.
_FAST = {"xla_backend_optimization_level": 0}


def seeds_of(chunk: int) -> range:
    return range(chunk * _CHUNK, (chunk + 1) * _CHUNK)


# --- the XLA backend -------------------------------------------------------------------------------------------------


def by_xla(programs: Sequence[Program], optimize: bool) -> Sequence[Sequence[np.ndarray]]:
    """The outputs of programs that are compiled as one function, with 64-bit types."""
    funcs = [pipeline.run(p.func) if optimize else p.func for p in programs]

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(run(func, *inputs) for func, inputs in zip(funcs, arrays, strict=True))

    arrays = [p.arrays for p in programs]
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


@pytest.mark.sweep(6)
@chunks(6)
def test_the_xla_backend_agrees_with_the_interpreter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every other chunk as users' programs come, the others with small batches of programs, and without passes.
    optimize = chunk % 2 == 0
    if not optimize:
        monkeypatch.setattr(calibration, "BATCH_BYTES", 64)
    check(seeds_of(chunk), partial(by_xla, optimize=optimize))


# --- the LLVM backend ------------------------------------------------------------------------------------------------


def by_llvm(programs: Sequence[Program], machine: Machine | None) -> Sequence[Sequence[np.ndarray]]:
    """The outputs of programs that are called from one function, with 64-bit types."""
    lowerings = [LlvmLowering(pipeline.run(p.func), machine) for p in programs]

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(tuple(lowering.run(*x)) for lowering, x in zip(lowerings, arrays, strict=True))

    arrays = [p.arrays for p in programs]
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


@pytest.mark.sweep(6)
@chunks(6)
def test_llvm_code_agrees_with_the_interpreter(chunk: int) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    check(seeds_of(chunk), partial(by_llvm, machine=None))


# Fewer programs: what other CPUs do in a way of their own is little.
_OTHERS = 100


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", [AVX2, AVX512], ids=lambda m: m.cpu)
@chunks(1)
def test_llvm_code_for_lesser_machines_agrees_with_the_interpreter(chunk: int, machine: Machine) -> None:
    if not runs_here(machine):
        pytest.skip(f"needs a CPU that runs code for {machine.cpu}")
    check(range(chunk * _OTHERS, (chunk + 1) * _OTHERS), partial(by_llvm, machine=machine))


# --- the Triton backend ----------------------------------------------------------------------------------------------


def by_triton(programs: Sequence[Program]) -> Sequence[Sequence[np.ndarray]]:
    """The outputs, by Triton's interpreter; of a program that is refused, what they should be."""
    return [_triton(program) or interpret(program.func, *program.arrays, orders=1) for program in programs]


def _triton(program: Program) -> Sequence[np.ndarray]:
    try:
        source = build(pipeline.run(program.func), CHIPS["cuda:sm_90"], {})
    except TargetError as error:
        assert "has no atomic" in error.summary
        return ()
    return triton_interpret(source, program.arrays)


@pytest.mark.sweep(6)
@chunks(6)
def test_triton_source_agrees_with_the_interpreter(chunk: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check(seeds_of(chunk), by_triton)


@chunks(1)
def test_triton_compiles_random_programs(chunk: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    chip = CHIPS["cuda:sm_90"]
    for seed in list(seeds_of(chunk))[::10]:
        with contextlib.suppress(TargetError):
            compile_program(build(pipeline.run(sample(seed)[0].func), chip, {}), chip)


# --- the Mosaic backend -----------------------------------------------------------------------------------------------

NARROW = tuple(d for d in DTYPES.values() if d.itemsize <= 4)
# Pallas' interpreter makes large programs, which take time to compile.
_INTERPRETED, _WITH_LOOPS = 40, 24


def interpreted(lowerings: Sequence[MosaicLowering], programs: Sequence[Program]) -> Sequence[Sequence[np.ndarray]]:
    """The outputs by Pallas' interpreter, compiled as one function."""

    def together(*arrays: Sequence[jax.Array]) -> Any:
        pairs = zip(lowerings, arrays, strict=True)
        return tuple(lowering.run(*inputs, interpret=True) for lowering, inputs in pairs)

    arrays = [p.arrays for p in programs]
    return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


def by_mosaic(programs: Sequence[Program]) -> Sequence[Sequence[np.ndarray]]:
    """The outputs of programs whose loops are inside of the kernels, each for some TPU."""
    targets = [t for t in TARGETS.values() if t.backend == "mosaic"]
    lowerings = [MosaicLowering(pipeline.run(p.func), targets[p.seed % len(targets)], run) for p in programs]
    return interpreted(lowerings, programs)


@pytest.mark.sweep(3)
@chunks(3)
def test_mosaic_kernels_agree_with_the_interpreter(chunk: int) -> None:
    check(range(chunk * _INTERPRETED, (chunk + 1) * _INTERPRETED), by_mosaic, dtypes=NARROW)


def by_mosaic_in_every_form(programs: Sequence[Program], seen: Counter[str]) -> Sequence[Sequence[np.ndarray]]:
    """Some output that is wrong, if one of the forms of a program with a loop gives it, or those that are right."""
    many: list[tuple[MosaicLowering, Program]] = []
    for program in programs:
        for func in (program.func, in_two(program.func)):
            forms = [f for f in every_plan(pipeline.run(func)) if kind_of_plan(f.planned) != "resident"]
            seen.update(kind_of_plan(f.planned) for f in forms)
            many += [(f, program) for f in forms]
    outputs: dict[Program, Sequence[np.ndarray]] = {p: p.expected for p in programs}
    results = interpreted([f for f, _ in many], [p for _, p in many])
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


@pytest.mark.sweep(2)
@chunks(2)
def test_mosaic_kernels_with_loops_in_the_grid_agree_with_the_interpreter(chunk: int) -> None:
    seen = Counter[str]()
    seeds = range(chunk * _WITH_LOOPS, (chunk + 1) * _WITH_LOOPS)
    check(seeds, partial(by_mosaic_in_every_form, seen=seen), dtypes=NARROW, make=OneLoop)
    assert min(seen[form] for form in ("grid_loop", "step_table", "pipelined")) >= 1, seen


# --- the passes ------------------------------------------------------------------------------------------------------


def on_request(func: Func) -> Func:
    """The passes that backends ask for."""
    for improve in (split_loops, skew_carries):
        func = improve(pipeline.run(func, check=True))
        verify(func)
    return pipeline.run(func, check=True)


def through_text(func: Func) -> Func:
    text = to_text(func)
    again = parse(text)
    assert to_text(again) == text
    return again


@pytest.mark.sweep(3)
@pytest.mark.parametrize("improve", [partial(pipeline.run, check=True), on_request, through_text])
@chunks(2)
def test_the_meaning_stays(chunk: int, improve: Any) -> None:
    def by_interpreter(programs: Sequence[Program]) -> Sequence[Sequence[np.ndarray]]:
        return [interpret(improve(p.func), *p.arrays, orders=1) for p in programs]

    check(seeds_of(chunk), by_interpreter)


@pytest.mark.sweep(2)
@chunks(2)
def test_programs_may_run_in_any_order(chunk: int) -> None:
    check(seeds_of(chunk), lambda programs: [interpret(p.func, *p.arrays, orders=3) for p in programs])


@pytest.mark.sweep(2)
@chunks(2)
def test_a_batch_is_as_many_runs(chunk: int) -> None:
    def by_batch(programs: Sequence[Program]) -> Sequence[Sequence[np.ndarray]]:
        return [[output[1] for output in _batched(p)] for p in programs]

    check(seeds_of(chunk), by_batch)


def _batched(program: Program) -> Sequence[np.ndarray]:
    """The outputs of two runs, the first one on zeros; inputs of odd number are shared."""
    func, size = program.func, 2
    dims = [0 if n % 2 == 0 or p.ref.role == "inout" else None for n, p in enumerate(func.inputs)]
    pairs = zip(program.arrays, dims, strict=True)
    arrays = [x if d is None else np.stack([np.zeros_like(x), x]) for x, d in pairs]
    return interpret(batch(func, size, dims), *arrays, orders=1)


# --- the programs themselves -----------------------------------------------------------------------------------------


@given(program=programs())
@settings(max_examples=20)
def test_hypothesis_makes_programs_too(program: Program) -> None:
    verify(program.func)
    assert_agrees(program, interpret(pipeline.run(program.func), *program.arrays))
