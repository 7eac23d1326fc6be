"""Compiled kernels of the library, run by the interpreter of PTX: they compute what the block IR means, without races.

Also the reverse: without one of its barriers, fences or waits a program is refused, or computes something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from bench.texts import function_of, gradient, kernels_of
from tests.ir.funcs import assert_near
from tests.lower.library import CASES, DIFFERENTIABLE, NAMES
from tests.lower.triton.gluon import samples
from tilekern.errors import InterpreterError, OutOfBoundsError, TargetError, TilekernError
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.kernel.instance import Instance
from tilekern.lower.target import resolve
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.triton.program import Program
from tilekern.lower.triton.ptx.run import run_ptx

pytest.importorskip("triton", reason="needs triton")

TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_90+gluon")
MOST_PROGRAMS = 256
"""Thread blocks of the largest launch that is run."""


def inputs(func: Func) -> list[Array]:
    """Numbers for the inputs of a kernel: integers are sorted and small, logarithms of decays are negative."""
    random = np.random.default_rng(0)
    made = list[Array]()
    for param in func.inputs:
        ref = param.ref
        if ref.dtype.kind in "iu":
            numbers = random.integers(0, 3, ref.shape)
            made.append((np.sort(numbers, axis=-1) if ref.shape else numbers).astype(ref.dtype))
        elif ref.dtype.kind == "b":
            made.append(random.random(ref.shape) < 0.7)
        else:
            x = random.standard_normal(ref.shape) / 2
            made.append((-abs(x) / 5 if "decay" in param.name else x).astype(ref.dtype))
    return made


def assert_same(found: Sequence[Array], func: Func, arrays: Sequence[Array]) -> None:
    """Assert that outputs are those of the block IR, up to the order of sums and a rounding of products to TF32."""
    for x, y in zip(found, interpret(func, *arrays, orders=1), strict=True):
        if x.dtype.kind in "iub":
            np.testing.assert_array_equal(x, y)
            continue
        wide = y.astype(np.float64)
        scale = float(np.abs(np.where(np.isfinite(wide), wide, 0)).max(initial=0))
        assert_near(x.astype(jnp.bfloat16), wide, scale)


def kernels(name: str, mode: str, dtype: str, target: str) -> list[Instance]:
    """The kernels of the first small case of a library function, or of its gradient."""
    case = CASES[name][0]
    case = case.small() if hasattr(case, "small") else case
    types = jax.eval_shape(partial(case.arrays, dtype=dtype), jax.random.key(0))
    call = function_of(name, case)
    return list(kernels_of(call if mode == "forward" else partial(gradient, call), types, resolve(target)))


def lowered(name: str, mode: str, dtype: str, target: str) -> Iterator[TritonLowering]:
    """Their programs that are small enough, and that the target takes."""
    for kernel in kernels(name, mode, dtype, target):
        try:
            lowering = kernel.lowered(resolve(target))
        except TilekernError:
            assert "gluon" in target  # it takes products, and what it does not take has tests of its own
            continue
        assert isinstance(lowering, TritonLowering)
        if lowering.program.programs <= MOST_PROGRAMS:
            yield lowering


ALL = [
    (name, mode, dtype, target)
    for name in NAMES
    for mode in ("forward", "gradient")[: 1 + (name in DIFFERENTIABLE)]
    for dtype in ("bfloat16", "float32")
    for target in TARGETS
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "mode", "dtype", "target"), ALL)
def test_compiled_kernels_compute_the_block_ir_without_races(name: str, mode: str, dtype: str, target: str) -> None:
    programs = list(lowered(name, mode, dtype, target))
    if not programs:
        pytest.skip(f"{target} has no small program")
    for lowering in programs:
        arrays = inputs(lowering.func)
        assert_same(lowering.compile().interpret(*arrays, races=True), lowering.func, arrays)


# --- plants -----------------------------------------------------------------------------------------------------------

KINDS = {
    "bar": r"bar\.sync",
    "proxy fence": r"fence\.proxy",
    "wait for copies": r"cp\.async\.wait",
    "wait for products": r"wgmma\.wait",
    "wait at an mbarrier": r"mbarrier\.try_wait",
    "arrival at an mbarrier": r"mbarrier\.arrive",
}
FUNC = samples.product(128, 576, 128)
"""Four programs; each takes more steps than it has tiles of operands in shared memory."""


@cache
def product(how: str) -> tuple[Program, Binary]:
    """A matrix product: by Gluon with specialised warps; by Triton with tensor copies; or with `cp.async`."""
    chip = CHIPS["cuda:sm_80" if how == "cp.async" else "cuda:sm_90"]
    program = samples.program(FUNC) if how == "gluon" else build(FUNC, chip, {})
    return program, compile_program(program, chip)


PLANTS = [
    ("gluon", ("bar", "proxy fence", "wait for products", "wait at an mbarrier", "arrival at an mbarrier")),
    ("tensor copies", ("bar", "proxy fence", "wait for products", "wait at an mbarrier", "arrival at an mbarrier")),
    ("cp.async", ("bar", "wait for copies")),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("how", "kind"), [(how, kind) for how, kinds in PLANTS for kind in kinds])
def test_a_product_without_its_synchronisation_is_noticed(how: str, kind: str) -> None:
    program, binary = product(how)
    text, count = re.subn(
        rf"^[^\n]*\b{KINDS[kind]}[^\n]*\n(\s*@!complete bra[^\n]*\n)?", "", binary.text("ptx"), flags=re.M
    )
    assert count
    planted = replace(binary, asm={**binary.asm, "ptx": text})
    try:
        found = run_ptx(program, planted, samples.inputs(FUNC), races=True, late=True)
    except InterpreterError as error:
        assert re.match("race|deadlock|no proxy fence|more than 1 thread", str(error.got))
    else:
        with pytest.raises(AssertionError):
            assert_same(found, FUNC, samples.inputs(FUNC))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", [how for how, _ in PLANTS])
def test_a_product_computes_the_same_early_and_late(how: str) -> None:
    program, binary = product(how)
    for late in (False, True):
        assert_same(run_ptx(program, binary, samples.inputs(FUNC), late=late), FUNC, samples.inputs(FUNC))


# --- the public door --------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((x.shape[0] - 1,), x.dtype))
def neighbours(x: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0] - 1, 64)
    out[i] = x[i] + x[i + 1]


X = jnp.arange(100.0)


def test_a_compiled_kernel_is_interpreted() -> None:
    compiled = neighbours.trace(X).lower("cuda:sm_90").compile()
    found = compiled.interpret(X)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.asarray(X[:-1] + X[1:]))


def test_an_access_outside_names_the_users_line() -> None:
    @tk.kernel(out_type=lambda x: x)
    def copy(x, out):
        out[...] = x[...]

    lowering = copy.trace(X).lower("cuda:sm_90")
    program = lowering._lowered.program
    binary = lowering.compile()._compiled._binary
    text, count = re.subn(r"(ld\.global[^\[]*\[ *%rd\d+ *)(\+ *0 *)?\]", r"\g<1>+4096]", binary.text("ptx"))
    assert count
    with pytest.raises(OutOfBoundsError) as caught:
        run_ptx(program, replace(binary, asm={**binary.asm, "ptx": text}), [np.asarray(X)])
    assert caught.value.loc.file == __file__


@pytest.mark.parametrize("target", ["cuda:sm_100", "rocm:gfx942", "cpu:llvm", "cpu:xla"])
def test_other_targets_have_no_interpreter_of_machine_code(target: str) -> None:
    with pytest.raises(TargetError, match="there is no interpreter of compiled programs") as caught:
        neighbours.trace(X).lower(target).compile().interpret(X)
    assert caught.value.got == f"target = {target}" and "interpret the lowered program" in caught.value.fix
