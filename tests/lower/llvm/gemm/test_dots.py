"""Dots of every dtype and layout, of sizes that leave rests of all blocks, against float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.machines import ALL, here
from tests.lower.llvm.running import run
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.core import Array, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, F64, DType, accumulator, kind_of
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.testing import assert_close
from tilekern.testing.support import Sketch

pytest.importorskip("llvmlite", reason="needs llvmlite")

# Rows, columns and depth: one, a vector of any length and its neighbours, blocks of rows and panels with their rests;
# a depth of several portions of a panel.
SIZES = (
    *((1, 1, 1), (1, 17, 3), (2, 16, 16), (5, 31, 7), (6, 64, 8), (7, 33, 15), (8, 48, 2), (9, 1, 33), (12, 65, 31)),
    *((13, 15, 17), (16, 97, 1), (17, 63, 64), (31, 8, 5), (1, 128, 64), (33, 100, 9), (3, 70, 301), (20, 5, 130)),
)


@dataclass(frozen=True)
class Case:
    """A dot: its sizes, which dims are contracted, and what its operands are."""

    rows: int
    columns: int
    depth: int
    batch: int
    outer: tuple[bool, bool]  # whether the contracted dim comes before the free one
    computed: tuple[bool, bool]  # whether an operand is computed, not loaded
    adds: bool

    def shape(self, side: int) -> tuple[int, ...]:
        """Of an operand."""
        matrix = ((self.rows, self.columns)[side], self.depth)
        return (*((self.batch,) if self.batch else ()), *(matrix[::-1] if self.outer[side] else matrix))

    def op(self, b: Sketch, dtype: DType) -> Value:
        """The result; an operand that is computed is the greater one of two arrays."""
        operands = [
            b.op(Elementwise, b.tile(dtype, self.shape(n)), b.tile(dtype, self.shape(n)), function="max")
            if self.computed[n]
            else b.tile(dtype, self.shape(n))
            for n in (0, 1)
        ]
        first = bool(self.batch)
        contract = tuple((first + (not outer),) for outer in self.outer)
        found = b.op(Dot, *operands, contract=contract, batch=((0,), (0,)) if first else ((), ()))
        if not self.adds:
            return found
        return b.op(Elementwise, found, b.tile(found.tile.dtype, found.tile.shape), function="add")


def cases(first: int) -> list[Case]:
    """Every layout with every kind of operands, each for other sizes."""
    flags = (False, True)
    kinds = itertools.product((0, 3), itertools.product(flags, flags), itertools.product(flags, flags))
    sizes = itertools.islice(itertools.cycle(SIZES), first, None)
    return [Case(*s, *kind, adds=n % 3 == 0) for n, (s, kind) in enumerate(zip(sizes, kinds))]  # noqa: B905 -- endless


def exact(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Small whole numbers, sums of whose products are exact in any order."""
    if dtype == BOOL or kind_of(dtype) == "unsigned":
        return rng.integers(0, 2 if dtype == BOOL else 5, shape).astype(dtype)
    return rng.integers(-4, 5, shape).astype(dtype)


# Every dtype on this machine, and on others what they do in a way of their own.
EXACT = [(name, None) for name in DTYPES]
EXACT += [(n, m) for m in here() for n in {"haswell": ("f32", "f64", "bf16", "i8", "u16")}.get(m.cpu, ("f32", "bf16"))]


def shown(parameter: object) -> str | None:
    """The name of a machine, in the name of a test."""
    return parameter.cpu if isinstance(parameter, Machine) else "host" if parameter is None else None


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("name", "machine"), EXACT, ids=shown)
def test_exact_products(name: str, machine: Machine | None) -> None:
    dtype, many = DTYPES[name], cases(3 * list(DTYPES).index(name))
    func = func_of(lambda b: [case.op(b, dtype) for case in many])
    rng = np.random.default_rng(0)
    arrays = [exact(rng, p.ref.shape, p.ref.dtype) for p in func.inputs]
    for case, got, wanted in zip(many, run(LlvmLowering(func, machine), arrays), interpret(func, *arrays), strict=True):
        assert got.dtype == accumulator(dtype)
        assert np.array_equal(got, wanted), f"{case}: {np.argwhere(got != wanted)[0]} of {got.shape}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", [None, *(m for m in here() if m.cpu == "haswell")], ids=shown)
@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "f64"])
def test_real_numbers_and_special_ones(name: str, machine: Machine | None) -> None:
    """A NaN, or an infinity, is where it belongs, and nowhere else: not in another row, nor in a padded column."""
    dtype, many = DTYPES[name], cases(5)
    func = func_of(lambda b: [case.op(b, dtype) for case in many])
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(p.ref.shape).astype(p.ref.dtype) for p in func.inputs]
    for x in arrays[::2]:
        x.ravel()[rng.integers(x.size)] = rng.choice([np.nan, np.inf, -np.inf])
    wide = func_of(lambda b: [case.op(b, F64) for case in many])
    oracles = interpret(wide, *(x.astype(F64) for x in arrays))
    results = run(LlvmLowering(func, machine), arrays)
    for case, got, oracle, low in zip(many, results, oracles, interpret(func, *arrays), strict=True):
        try:
            assert_close(got, oracle, low, length=case.depth)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if kind_of(d) in ("signed", "unsigned")])
def test_integers_wrap_around(name: str) -> None:
    dtype, many = DTYPES[name], cases(8)[:16]
    func = func_of(lambda b: [case.op(b, dtype) for case in many])
    limits, rng = ml_dtypes.iinfo(dtype), np.random.default_rng(2)
    arrays = [
        rng.choice(np.array([limits.min, limits.max, limits.max - 1, 0], p.ref.dtype), p.ref.shape)
        if p.ref.dtype == dtype
        else exact(rng, p.ref.shape, p.ref.dtype)
        for p in func.inputs
    ]
    for case, got, wanted in zip(many, run(LlvmLowering(func), arrays), interpret(func, *arrays), strict=True):
        assert np.array_equal(got, wanted), case


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("adds", [False, True])
def test_nothing_to_multiply(shape: tuple[int, int, int], adds: bool) -> None:
    case = Case(*shape, 0, (False, True), (False, True), adds)
    func = func_of(lambda b: [case.op(b, F32)])
    arrays = [np.ones(p.ref.shape, p.ref.dtype) for p in func.inputs]
    (got,), (wanted,) = run(LlvmLowering(func), arrays), interpret(func, *arrays)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("precision", ["ieee", "bf16x3", "bf16x6", "tf32", "bf16"])
def test_precisions(precision: str) -> None:
    """Numbers of few bits are exact in all of them."""

    def make(b: Sketch) -> list[Value]:
        left, right = b.tile(F32, (19, 40)), b.tile(F32, (40, 70))
        return [b.op(Dot, left, right, contract=((1,), (0,)), precision=precision)]

    func, rng = func_of(make), np.random.default_rng(3)
    arrays = [exact(rng, p.ref.shape, F32) for p in func.inputs]
    for machine in (None, *here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), arrays)[0], arrays[0] @ arrays[1])


def test_a_cast_on_the_way_needs_no_pass_of_its_own() -> None:
    """Packing computes the elements: scratch memory has room for the packed operand and the result only."""

    def make(b: Sketch) -> list[Value]:
        left, right = b.tile(BF16, (16, 64)), b.op(Convert, b.tile(F32, (64, 128)), dtype=BF16)
        return [b.op(Dot, left, right, contract=((1,), (0,)))]

    for machine in ALL:
        word = 2 if machine.multiplies_bfloat16 else 4
        left = 0 if machine.multiplies_bfloat16 else 16 * 64 * 4
        rows = -(-128 // machine.lanes) * machine.lanes
        assert LlvmLowering(func_of(make), machine).program.scratch <= 64 * rows * word + left + 16 * 128 * 4


@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.parametrize("outer", [False, True])
def test_left_operands_that_lie_badly(name: str, outer: bool) -> None:
    """Rows that meet in a set of the cache, and words in pages of their own, are packed for several panels."""
    case = Case(600 if outer else 35, 260, 9 if outer else 1024, 0, (outer, True), (False, False), adds=True)
    func, rng = func_of(lambda b: [case.op(b, DTYPES[name])]), np.random.default_rng(5)
    arrays = [exact(rng, p.ref.shape, p.ref.dtype) for p in func.inputs]
    (wanted,) = interpret(func, *arrays)
    for machine in (None, *here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), arrays)[0], wanted)


@pytest.mark.parametrize("outer", [(False, True), (True, False)])
def test_operands_are_cast_while_they_are_packed(outer: tuple[bool, bool]) -> None:
    """By vectors of every width: whole ones, two at once, and those of rests."""

    def make(b: Sketch) -> list[Value]:
        shapes = ((70, 40) if outer[0] else (40, 70)), ((70, 50) if outer[1] else (50, 70))
        operands = [b.op(Convert, b.tile(F32, shape), dtype=BF16) for shape in shapes]
        return [b.op(Dot, *operands, contract=tuple((int(not first),) for first in outer))]

    func, rng = func_of(make), np.random.default_rng(4)
    arrays = [rng.standard_normal(p.ref.shape, np.float32) for p in func.inputs]
    (low,) = interpret(func, *arrays)
    left, right = (x.astype(BF16).astype(F64) for x in arrays)
    oracle = (left.T if outer[0] else left) @ (right if outer[1] else right.T)
    for machine in (None, *here()):
        assert_close(run(LlvmLowering(func, machine), arrays)[0], oracle, low, length=70)
