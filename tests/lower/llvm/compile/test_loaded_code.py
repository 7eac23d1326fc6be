"""Machine code is freed with the functions that call it, and not before."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.tasks import numbers, run, scale
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.compile.loaded_code import CodeTable

pytest.importorskip("llvmlite", reason="needs llvmlite")

X = np.ones((64, 8), np.float32)


def collected() -> CodeTable:
    """The table of loaded kernels when only those are in it that somebody uses."""
    jax.clear_caches()
    for _ in range(3):  # cycles through JAX's objects go one after the other
        gc.collect()
    table = toolchain.code_table()
    table.unload_unused()
    return table


def executable_bytes() -> int:
    """The anonymous memory of this process from which code can run."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    areas = [line[0].split("-") for line in lines if "x" in line[1] and len(line) == 5]
    return sum(int(end, 16) - int(begin, 16) for begin, end in areas)


def call_of_a_kernel(factor: float) -> None:
    @tk.kernel(out_type=lambda x: x)
    def scaled(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 64)
        out[i] = x[i] * factor

    assert (np.asarray(scaled(X, target="cpu:llvm")) == np.float32(factor)).all()


@pytest.mark.smoke
@pytest.mark.slow
def test_kernels_take_no_more_memory_the_more_there_were() -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    call_of_a_kernel(0.5)
    loaded, before = len(collected()), executable_bytes()
    for n in range(10):
        call_of_a_kernel(n + 1.0)
    for n in range(100):
        jax.jit(lambda x, n=n: run(scale(2, n + 0.375), x))(numbers(2))
    assert executable_bytes() > before  # the last ones stay, in case that they are defined again
    assert (len(collected()), executable_bytes()) == (loaded, before)


def test_code_of_functions_that_live() -> None:
    x, functions = numbers(2), [jax.jit(lambda x, n=n: run(scale(2, n + 0.25), x)) for n in range(5)]
    for function in functions:
        function(x)
    compiled = [jax.jit(lambda x, n=n: run(scale(2, n + 0.75), x)).lower(x).compile() for n in range(5)]
    table = collected()
    for n in range(100):  # reuse the memory of what was freed too early
        toolchain.compile(scale(2, n + 100.0))
    table.unload_unused()
    for n in range(5):
        np.testing.assert_array_equal(functions[n](x), (n + np.float32(0.25)) * x)
        np.testing.assert_array_equal(compiled[n](x), (n + np.float32(0.75)) * x)


def test_a_lowered_program_keeps_the_code() -> None:
    x = numbers(2)
    lowered = jax.jit(lambda x: run(scale(2, 77.0), x) + 1).lower(x)
    loaded = len(collected())
    executable = lowered.compile()
    del lowered
    assert len(collected()) == loaded
    np.testing.assert_array_equal(executable(x), 77 * x + 1)
    del executable
    assert len(collected()) == loaded - 1


def test_stages_keep_the_code() -> None:
    @tk.kernel(out_type=lambda x: x)
    def tripled(x: Any, out: Any) -> None:
        out[...] = x[...] * 3

    compiled = tripled.trace(X).lower("cpu:llvm").compile()
    collected()
    np.testing.assert_array_equal(compiled(X), 3 * X)


def test_code_is_dropped_while_it_runs() -> None:
    """Threads define, run and drop kernels, and nobody waits for the results."""

    def repeat(thread: int) -> None:
        for n in range(4):
            factor = thread + 1 + n / 16
            results = [jax.jit(lambda x, f=factor: run(scale(16, f), x))(numbers(16)) for _ in range(2)]
            jax.clear_caches()
            gc.collect()
            toolchain.code_table().unload_unused()
            for result in results:
                np.testing.assert_array_equal(result, np.float32(factor) * numbers(16))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(repeat, range(4)))


def test_a_program_without_its_code() -> None:
    """A program whose code is not loaded, as if another process had lowered it."""
    run(scale(1), numbers(1))  # registers the handlers
    call = jax.ffi.ffi_call("tilekern_llvm", jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"NOT_FOUND: .*its machine code is not loaded"):
        jax.jit(lambda x: call(x, key="0" * 32)).lower(np.ones(4, np.float32)).compile()
