"""No load and no store leaves an array: pages directly before and behind each one, and the scratch, end the process."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import pytest

from tests.lower.library import CASES, family_of
from tests.lower.llvm.machines import here
from tests.lower.llvm.running import guarded, run
from tests.lower.llvm.tasks import process
from tilekern.ir.core import Array
from tilekern.ir.types import kind_of
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.target import TARGETS
from tilekern.passes import pipeline
from tilekern.testing.programs import assert_agrees
from tilekern.testing.programs.batches import sample

pytest.importorskip("llvmlite", reason="needs llvmlite")

ENDS = [guarded("begin"), guarded("end")]
# Of each kernel, cases of ragged shapes: how many.
_CASES = 2
# Kernels of the library are run in so many processes.
_PARTS = 8


def random_programs(seeds: Iterable[int]) -> None:
    """Run random programs between guards; the process ends by a signal at a stray access."""
    for seed in seeds:
        program = sample(seed)[0]
        func = pipeline.run(program.func)
        for machine in here():
            sys.stdout.write(f"seed {seed}, {machine.cpu}\n")
            sys.stdout.flush()
            lowering = LlvmLowering(func, machine)
            for place in ENDS:
                assert_agrees(program, run(lowering, program.arrays, place))


def kernels(name: str) -> None:
    """Run small cases of a kernel of the library between guards."""
    for case in CASES[name][:_CASES]:
        for dtype in ("float32", "bfloat16"):
            func = family_of(name, case.small(), dtype).func(TARGETS["cpu:llvm"])
            rng = np.random.default_rng(0)
            arrays = [_numbers(rng, p.ref.shape, p.ref.dtype) for p in func.inputs]
            for machine in here():
                sys.stdout.write(f"{name} {case.name} {dtype}, {machine.cpu}\n")
                sys.stdout.flush()
                lowering = LlvmLowering(func, machine)
                first, second = (run(lowering, arrays, place) for place in ENDS)
                for x, y in zip(first, second, strict=True):
                    assert x.tobytes() == y.tobytes()


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    if kind_of(dtype) == "float":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)  # labels, or sizes of groups


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", range(0, 60, 30))
def test_random_programs_stay_inside(first: int) -> None:
    code = f"from tests.lower.llvm.test_memory_bounds import *\nrandom_programs(range({first}, {first + 30}))"
    assert process(f"jax.config.update('jax_enable_x64', True)\n{code}").count("seed") == 30 * len(here())


@pytest.mark.sweep(_PARTS)
@pytest.mark.parametrize("part", range(_PARTS))
def test_kernels_stay_inside(part: int) -> None:
    names = sorted(CASES)[part::_PARTS]
    code = f"from tests.lower.llvm.test_memory_bounds import *\nfor name in {names}: kernels(name)"
    expected = sum(2 * len(CASES[name][:_CASES]) for name in names)
    assert process(code).count("float") == expected * len(here())


@pytest.mark.parametrize(("end", "at", "action"), [("begin", -1, "x[0]"), ("end", 100, "x[0] = 1")])
def test_a_guard_ends_the_process(end: str, at: int, action: str) -> None:
    """Or else the tests above prove nothing."""
    code = f"""
from tests.lower.llvm.running import guarded
import ctypes
memory = guarded({end!r})(100)
inside = memory.array((100,), np.uint8)
inside[...] = 7
print(int(inside.sum()), flush=True)
x = (ctypes.c_char * 1).from_address(memory.address + {at})
{action}
"""
    with pytest.raises(AssertionError) as caught:
        process(code)
    assert str(caught.value) == "700\n"
