"""Whole programs: the same bytes for the same Func, golden texts, and launch data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.kernels import LIKE, attention, histogram, matmul, softmax
from tests.lower.triton.running import assert_kernel, assert_neat, assert_runs, program_of, run
from tilekern.errors import TargetError
from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.ir.types import F32, I32
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.passes import pipeline
from tilekern.testing.programs.batches import sample

GOLDEN = Path(__file__).parent / "golden"


def traced(kernel: Any, *types: tuple[tuple[int, ...], Any]) -> Func:
    return kernel.trace(*(LIKE(shape, dtype) for shape, dtype in types)).ir


_HEADS = ((1000, 4, 64), jnp.bfloat16)
FUNCS: dict[str, tuple[Callable[[], Func], str]] = {
    "matmul": (lambda: traced(matmul, ((1000, 712), jnp.bfloat16), ((712, 520), jnp.bfloat16)), "cuda:sm_90"),
    "matmul_float32": (lambda: traced(matmul, ((1000, 510), F32), ((510, 256), F32)), "cuda:sm_90"),
    "attention_sm_80": (lambda: traced(attention, _HEADS, _HEADS, _HEADS), "cuda:sm_80"),
    "attention_sm_90": (lambda: traced(attention, _HEADS, _HEADS, _HEADS), "cuda:sm_90"),
    "softmax": (lambda: traced(softmax, ((100, 1000), jnp.bfloat16)), "cuda:sm_90"),
    "histogram": (lambda: traced(histogram, ((10, 6), F32), ((10,), I32), ((), I32)), "cuda:sm_90"),
}


@pytest.mark.parametrize("name", FUNCS)
def test_golden(name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read their diff."""
    make, chip = FUNCS[name]
    file, text = GOLDEN / f"{name}.py.txt", program_of(make(), chip).text
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_the_golden_kernels_compute() -> None:
    pytest.importorskip("triton", reason="needs triton")
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, shape).astype(jnp.bfloat16) for shape in ((70, 48), (48, 40)))
    assert_kernel(matmul, x, w, block_m=32, block_n=16, block_k=32)
    rows = np.array([0, 0, 9, 3, -1, 3, 3, 20, 5, 5], np.int32)
    for kind in (0, 1, 2, 7):
        assert_kernel(histogram, rng.integers(0, 9, (10, 6)).astype(np.float32), rows, np.asarray(kind, np.int32))


# --- the same Func, the same text -----------------------------------------------------------------------------------


def texts(seeds: range) -> str:
    """The programs of random Funcs and of the golden ones, one behind the other."""
    found = [build(pipeline.run(make()), CHIPS[chip], {}) for make, chip in FUNCS.values()]
    for seed in seeds:
        try:
            found.append(build(pipeline.run(sample(seed)[0].func), CHIPS["cuda:sm_90"], {}))
        except TargetError:
            continue
    return "\n".join(f"{p.text}{p.arguments}{p.results}{p.num_warps}{sorted(p.lines)}" for p in found)


SEEDS = range(20)


def test_the_same_func_gives_the_same_bytes_in_every_process() -> None:
    root = Path(__file__).parents[3]
    code = "from tests.lower.triton.test_build import SEEDS, texts; print(texts(SEEDS), end='')"
    expected = texts(SEEDS)
    assert expected == texts(SEEDS)
    # Hashes of this process are random.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == expected


def test_random_programs_are_neat() -> None:
    """There is no dead line, every name is read, and the arguments are those of the call."""
    for seed in range(60):
        func = pipeline.run(sample(seed)[0].func)
        if 0 in func.grid:  # it never runs, and its stores are left out
            continue
        try:
            program = build(func, CHIPS["cuda:sm_90"], {})
        except TargetError:
            continue
        assert_neat(program)


# --- how it is launched ---------------------------------------------------------------------------------------------


def test_launch_options_are_taken() -> None:
    func, _ = FUNCS["softmax"]
    program = program_of(func(), num_warps=2, num_stages=5)
    assert (program.num_warps, program.num_stages, program.programs) == (2, 5, 25)


def test_a_func_that_does_nothing() -> None:
    program = program_of(parse("func @f(%x: ref<f32[4], in>) {\n}"))
    assert program.text.endswith("def f(x_ptr):\n    pass\n") or program.text.endswith("def f():\n    pass\n")


@given(extent=st.integers(0, 5))
def test_as_many_programs_as_the_grid_has(extent: int) -> None:
    func = parse(f"""
func @f(%x: ref<f32[8], in>, %o: ref<f32[{extent}, 3, 8], out>) {{
  grid %i in i[{extent} by 1], %j in j[3 by 1]
  %a = load %x[0 +: 8!] : f32[8]
  store %a to %o[%i!, %j!, 0 +: 8!]
}}""")
    assert build(pipeline.run(func), CHIPS["cuda:sm_90"], {}).programs == 3 * extent


def test_only_the_iterations_that_need_masks_have_them() -> None:
    """Keys in front of all queries of a tile need no comparison: they have a loop of their own."""
    func = attention.trace(*[LIKE((1024, 4, 64), jnp.bfloat16)] * 3).ir
    first, second = program_of(func, "cuda:sm_80").text.split("    for j")[1:]
    assert "tl.where" not in first and "tl.where" in second


def test_masks_of_products_of_warpgroups_stand_in_a_branch() -> None:
    """One loop: two of them would make ptxas wait for each product."""
    text = program_of(attention.trace(*[LIKE((1024, 4, 64), jnp.bfloat16)] * 3).ir).text
    (loop,) = text.split("    for j")[1:]
    branch = loop[loop.index("        if ") : loop.index("        else:")]
    assert "tl.where" in branch and loop.count('float("-inf")') == branch.count('float("-inf")')


@pytest.mark.parametrize("tokens", [100, 300, 384])
def test_delayed_products_give_the_same_bits(tokens: int) -> None:
    """One tile, ragged ones, whole ones: as of a GPU for which no product is delayed."""
    random = np.random.default_rng(tokens)
    arrays = [random.standard_normal((tokens, 2, 64)).astype(jnp.bfloat16) for _ in range(3)]
    func = attention.trace(*arrays).ir
    delayed, plain = (program_of(func, chip) for chip in ("cuda:sm_90", "cuda:sm_80"))
    assert ("v_tile_2" in delayed.text) == (tokens > 128)  # the values of the last tile
    for got, wanted in zip(run(delayed, arrays), run(plain, arrays), strict=True):
        assert got.tobytes() == wanted.tobytes()


def test_names_that_mean_something_in_triton() -> None:
    func = parse("""
func @tl(%x: ref<f32[4], in>, %x_ptr: ref<f32[4], out>) {
  %for = load %x[0 +: 4!] : f32[4]
  %tl = scan(%for) {monoid="max", dim=0} : f32[4]
  store %tl to %x_ptr[0 +: 4!]
}""")
    program = assert_runs(func, np.array([1, 3, 2, np.nan], np.float32))
    assert program.name == "tl_2" and [a.name for a in program.arguments] == ["x_ptr", "x_ptr_ptr"]
