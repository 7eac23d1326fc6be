"""Products of fours of 8-bit integers: exact for the extremes, on every kind of machine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.gemm.test_dots import SIZES, Case, cases
from tests.lower.llvm.machines import AVX2, AVX512, BFLOAT16, FOURS, NEON_FOURS, runs_here
from tests.lower.llvm.running import run
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.core import Value
from tilekern.ir.types import DTYPES, I32
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.testing.support import Sketch

pytest.importorskip("llvmlite", reason="needs llvmlite")

# Vectors of 256 bits with the instruction of AVX512-VNNI. No CPU is described so, but many run such code.
NARROW = Machine(
    "x86_64-unknown-linux-gnu",
    "x86-64-v4",
    "+avx512vl,+avx512vnni",
    vector_bytes=32,
    registers=16,
    has_int16_pairs=True,
    has_int8_fours=True,
)
RUNNING = [machine for machine in (AVX2, AVX512, BFLOAT16, NARROW) if runs_here(machine)]
DTYPES_OF_FOURS = ("i8", "u8")


def product(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    """The exact result of a case, which wraps around in int32."""
    operands = []
    for side in (0, 1):
        x = np.maximum(arrays.pop(0), arrays.pop(0)) if case.computed[side] else arrays.pop(0)
        operands.append((x.swapaxes(-1, -2) if case.outer[side] else x).astype(np.int64))
    total = np.einsum("...ik,...jk->...ij", *operands)
    return (total + arrays.pop(0) if case.adds else total).astype(np.int32)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", [None, *RUNNING], ids=lambda m: m.cpu if isinstance(m, Machine) else "host")
@pytest.mark.parametrize("name", DTYPES_OF_FOURS)
def test_products_of_extremes_are_exact(name: str, machine: Machine | None) -> None:
    dtype, rng = DTYPES[name], np.random.default_rng(0)
    many = [*cases(5), *(Case(*size, 0, (False, True), (False, False), adds=False) for size in SIZES)]
    func = func_of(lambda b: [case.op(b, dtype) for case in many])
    limits = np.iinfo(dtype)
    numbers = np.array([limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1], dtype)
    arrays = [
        rng.choice(numbers, p.ref.shape) if p.ref.dtype == dtype else rng.integers(-9, 9, p.ref.shape, np.int32)
        for p in func.inputs
    ]
    remaining = list(arrays)
    for case, got in zip(many, run(LlvmLowering(func, machine), arrays), strict=True):
        assert np.array_equal(got, product(case, remaining)), case


@pytest.mark.parametrize("depth", [2_000, 70_001])
@pytest.mark.parametrize("name", DTYPES_OF_FOURS)
def test_sums_over_a_long_depth_wrap_around(name: str, depth: int) -> None:
    """The largest products of one sign, whose sum leaves int32 for uint8, in several portions of a panel."""
    case = Case(5, 35, depth, 0, (False, True), (False, False), adds=False)
    func, limits = func_of(lambda b: [case.op(b, DTYPES[name])]), np.iinfo(DTYPES[name])
    for left, right in ((limits.min, limits.min), (limits.max, limits.max), (limits.min, limits.max)):
        arrays = [np.full(p.ref.shape, x, p.ref.dtype) for p, x in zip(func.inputs, (left, right), strict=True)]
        for machine in (None, *RUNNING):
            got = run(LlvmLowering(func, machine), arrays)[0]
            assert np.array_equal(got, product(case, list(arrays)))


@pytest.mark.parametrize(
    ("machine", "instruction"), [(BFLOAT16, "vpdpbusd"), (FOURS, "vpdpbusd"), (NEON_FOURS, "dot\t")]
)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", DTYPES_OF_FOURS)
def test_instructions(name: str, machine: Machine, instruction: str) -> None:
    case = Case(32, 64, 64, 0, (False, True), (False, False), adds=False)
    assembly = LlvmLowering(func_of(lambda b: [case.op(b, DTYPES[name])]), machine).compile().asm["s"]
    assert instruction in assembly


def test_operands_are_not_widened() -> None:
    """Scratch memory has room for a packed operand of bytes, its offsets, and the sums."""

    def make(b: Sketch) -> list[Value]:
        left, right = (b.op(Convert, b.tile(I32, shape), dtype=DTYPES["i8"]) for shape in ((16, 64), (64, 128)))
        return [b.op(Dot, left, right, contract=((1,), (0,)))]

    scratch = LlvmLowering(func_of(make), BFLOAT16).program.scratch
    assert scratch <= 64 * 128 + 16 * 64 + 128 * 4 + 16 * 128 * 4
