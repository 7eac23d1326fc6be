"""Every cell of the elementwise table, casts and selects on numbers where things go wrong."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest

from tests.ir.funcs import assert_same, edges
from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.machines import here
from tests.lower.llvm.math.test_functions import BOUNDS
from tests.lower.llvm.running import run
from tilekern.ir.compute import Bitcast, Convert, Select
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.types import BOOL, DTYPES, DType, kind_of
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.testing.support import Sketch

pytest.importorskip("llvmlite", reason="needs llvmlite")

# What rounds: their errors on the whole range are bounded in test_functions.py.
ROUNDS = BOUNDS.keys()
MACHINES = [None, *(m for m in here() if m.cpu == "haswell")]


def rows_of(dtype: DType, arity: int) -> list[str]:
    return [n for n, row in TABLE.items() if row.arity == arity and kind_of(dtype) in row.accepts]


@cache
def numbers(dtype: DType) -> Array:
    """Numbers of a length that leaves a rest of a vector of any length; of 16 bits all that there are."""
    found = edges(dtype)
    if dtype.itemsize == 2:
        found = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    return np.concatenate([found, found[: 31 + -len(found) % 32]])


@cache
def pairs(dtype: DType) -> tuple[Array, Array]:
    """All pairs of some numbers, and a few more."""
    few = edges(dtype, 16)
    if dtype.itemsize == 1 and dtype != BOOL:
        few = np.concatenate([few[:24], few[::7]])
    left, right = (x.ravel() for x in np.meshgrid(few, few))
    more = 31 + -len(left) % 32
    return np.concatenate([left, right[:more]]), np.concatenate([right, left[:more]])


def check(func: Func, names: list[str], arrays: list[Array], machine: Machine | None) -> None:
    """The code's results are the interpreter's: bit for bit, but for NaN, zeros that are equal, and what rounds."""
    found = run(LlvmLowering(func, machine), arrays)
    for name, got, wanted in zip(names, found, interpret(func, *arrays), strict=True):
        try:
            if name in ROUNDS:
                _assert_close(got, wanted)
            else:
                assert_same(got, wanted, zeros=name not in ("max", "min", "rem"))
        except AssertionError as error:
            raise AssertionError(f"{name} of {func.inputs[0].ref.dtype}: {error}") from error


def _assert_close(got: Array, wanted: Array) -> None:
    """Neighbours; in float32 as far apart as the bound of a function and the interpreter's own error add up to."""
    if got.dtype.itemsize == 8:
        return  # the interpreter is no better than the code
    apart = 2 if got.dtype.itemsize == 4 else 1
    size = got.dtype.itemsize
    ordered = [np.where(b < 0, np.iinfo(b.dtype).min - b, b) for b in (x.view(f"i{size}") for x in (got, wanted))]
    near = np.abs(ordered[0].astype(np.int64) - ordered[1].astype(np.int64)) <= apart
    same = np.where(np.isnan(got) | np.isnan(wanted), np.isnan(got) & np.isnan(wanted), near)
    at = np.argmin(same)
    assert same.all(), f"{got[at]}, expected {wanted[at]}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.cpu if m else "host")
@pytest.mark.parametrize("name", DTYPES)
def test_functions_of_one_number(name: str, machine: Machine | None) -> None:
    dtype = DTYPES[name]
    x, names = numbers(dtype), rows_of(dtype, 1)
    if dtype.itemsize == 8:
        names = [n for n in names if n not in ROUNDS]

    def make(b: Sketch) -> list[Value]:
        tile = b.tile(dtype, x.shape)
        return [b.op(Elementwise, tile, function=n) for n in names]

    if names:
        check(func_of(make), names, [x], machine)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.cpu if m else "host")
@pytest.mark.parametrize("name", DTYPES)
def test_functions_of_two_numbers(name: str, machine: Machine | None) -> None:
    dtype = DTYPES[name]
    (x, y), names = pairs(dtype), rows_of(dtype, 2)
    names = [n for n in names if n not in ROUNDS or dtype.itemsize < 8]
    if kind_of(dtype) in ("signed", "unsigned"):  # by 0 it is unspecified
        names = [n for n in names if n not in ("div", "rem")]

    def make(b: Sketch) -> list[Value]:
        tiles = b.tile(dtype, x.shape), b.tile(dtype, x.shape)
        return [b.op(Elementwise, *tiles, function=n) for n in names]

    check(func_of(make), names, [x, y], machine)


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if kind_of(d) in ("signed", "unsigned")])
def test_integer_division(name: str) -> None:
    dtype = DTYPES[name]
    x, y = pairs(dtype)
    safe = np.where(y == 0, np.ones_like(y), y)

    def make(b: Sketch) -> list[Value]:
        tiles = b.tile(dtype, x.shape), b.tile(dtype, x.shape)
        return [b.op(Elementwise, *tiles, function=n) for n in ("div", "rem")]

    check(func_of(make), ["div", "rem"], [x, safe], None)
    run(LlvmLowering(func_of(make)), [x, y])  # never a trap


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.cpu if m else "host")
@pytest.mark.parametrize("name", DTYPES)
def test_casts(name: str, machine: Machine | None) -> None:
    dtype = DTYPES[name]
    x = numbers(dtype)

    def make(b: Sketch) -> list[Value]:
        tile = b.tile(dtype, x.shape)
        return [b.op(Convert, tile, dtype=other) for other in DTYPES.values()]

    check(func_of(make), [f"convert to {n}" for n in DTYPES], [x], machine)


@pytest.mark.parametrize("name", DTYPES)
def test_bits_stay(name: str) -> None:
    """Select, bitcast, load and store move bits, those of NaN and of zeros, too."""
    dtype = DTYPES[name]
    x, which = numbers(dtype), np.arange(len(numbers(dtype))) % 3 == 0
    bits = np.dtype(f"u{dtype.itemsize}")

    def make(b: Sketch) -> list[Value]:
        tile, mask = b.tile(dtype, x.shape), b.tile(BOOL, x.shape)
        chosen = b.op(Select, mask, tile, b.tile(dtype, x.shape))
        if dtype == BOOL:
            return [tile, chosen]
        back = b.op(Bitcast, b.op(Bitcast, tile, dtype=bits), dtype=dtype)
        return [tile, chosen, back, b.op(Bitcast, tile, dtype=bits)]

    found = run(LlvmLowering(func_of(make)), [x, which, x[::-1].copy()])
    assert found[0].tobytes() == x.tobytes()
    assert found[1].tobytes() == np.where(which, x.view(bits), x[::-1].copy().view(bits)).tobytes()
    assert all(again.tobytes() == x.tobytes() for again in found[2:])


def test_every_number_of_16_bits_is_tried() -> None:
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        assert len(np.unique(numbers(dtype).view(np.uint16))) == 1 << 16
        assert len(numbers(dtype)) % 32 == 31
