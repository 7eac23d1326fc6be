"""Functions of bytes: looked up where registers hold the table, with the same results everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.machines import ALL, BFLOAT16, here, runs_here
from tests.lower.llvm.running import run
from tilekern.ir.compute import Bitcast, Convert, Dot, Select
from tilekern.ir.core import Func, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32, DType
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.testing.support import Sketch

pytest.importorskip("llvmlite", reason="needs llvmlite")

_I8, _U8 = DTYPES["i8"], DTYPES["u8"]
_LOOKUP = "permvar"
_SHAPE = (3, 256)
_MATRIX = (67, 300)
_TRANSPOSED = (300, 67)

# A CPU with AVX512-BF16 that looks bytes up.
TABLES = replace(BFLOAT16, features=f"+avx512vbmi,{BFLOAT16.features}", has_byte_tables=True)


def number(b: Sketch, n: float, dtype: DType) -> Value:
    return b.op(Broadcast, b.splat(n, dtype), shape=_SHAPE, dims=())


def low_signed(b: Sketch, x: Value) -> Value:
    signed = b.op(Bitcast, x, dtype=_I8)
    four = number(b, 4, _I8)
    shifted = b.op(Elementwise, signed, four, function="shift_left")
    return b.op(Convert, b.op(Elementwise, shifted, four, function="shift_right_arithmetic"), dtype=F32)


def high_signed(b: Sketch, x: Value) -> Value:
    signed = b.op(Bitcast, x, dtype=_I8)
    high = b.op(Elementwise, signed, number(b, 4, _I8), function="shift_right_arithmetic")
    return b.op(Elementwise, b.op(Convert, high, dtype=F32), number(b, 0.5, F32), function="mul")


def reciprocal(b: Sketch, x: Value) -> Value:
    """1 / (x & 15), with an infinity, and a NaN for 7."""
    low = b.op(Convert, b.op(Elementwise, x, number(b, 15, _U8), function="and"), dtype=F32)
    is_seven = b.op(Elementwise, low, number(b, 7.0, F32), function="eq")
    quotient = b.op(Elementwise, number(b, 1.0, F32), low, function="div")
    return b.op(Select, is_seven, number(b, np.nan, F32), quotient)


def of_all_bits(b: Sketch, x: Value) -> Value:
    wide = b.op(Convert, x, dtype=I32)
    return b.op(Convert, b.op(Elementwise, wide, wide, function="mul"), dtype=F32)


def of_two_tiles(b: Sketch, x: Value) -> Value:
    masked = b.op(Elementwise, x, b.tile(_U8, _SHAPE), function="and")
    return b.op(Convert, b.op(Elementwise, masked, number(b, 15, _U8), function="and"), dtype=F32)


def of_few_ops(b: Sketch, x: Value) -> Value:
    return b.op(Convert, b.op(Elementwise, x, number(b, 15, _U8), function="and"), dtype=F32)


@pytest.mark.parametrize(
    ("function", "is_looked_up"),
    [
        *((f, True) for f in (low_signed, high_signed, reciprocal)),
        *((f, False) for f in (of_all_bits, of_two_tiles, of_few_ops)),
    ],
)
def test_functions_of_half_a_byte_are_looked_up(function: Callable[[Sketch, Value], Value], is_looked_up: bool) -> None:
    """All bytes give the interpreter's bits, on machines with the instruction and on others."""
    func = func_of(lambda b: [function(b, b.tile(_U8, _SHAPE))])
    rng = np.random.default_rng(0)
    arrays = [np.resize(np.arange(256, dtype=np.uint8), p.ref.shape) for p in func.inputs]
    arrays = [arrays[0], *(rng.permutation(x.ravel()).reshape(x.shape) for x in arrays[1:])]
    (wanted,) = interpret(func, *arrays)
    for machine in (None, *here()):
        (got,) = run(LlvmLowering(func, machine), arrays)
        np.testing.assert_array_equal(got, wanted)
    for machine in ALL:
        has_room = machine.is_x86 and machine.vector_bytes == 64
        assert (_LOOKUP in LlvmLowering(func, machine).text) == (is_looked_up and has_room), machine.cpu


def test_conditions_of_bytes_are_part_of_the_function() -> None:
    """A bool in between has as many results as there are bytes."""

    def make(b: Sketch) -> list[Value]:
        x = b.tile(_U8, _SHAPE)
        low = b.op(Elementwise, x, number(b, 15, _U8), function="and")
        is_large = b.op(Elementwise, low, number(b, 7, _U8), function="gt")
        assert is_large.tile.dtype == BOOL
        return [b.op(Select, is_large, b.op(Convert, low, dtype=F32), number(b, -1.0, F32))]

    func = func_of(make)
    x = np.resize(np.arange(256, dtype=np.uint8), _SHAPE)
    for machine in (None, *here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), [x])[0], interpret(func, x)[0])


# --- all bits of a byte, as an operand of a product in bfloat16 ------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["i8", "u8", "f8e4m3fn", "f8e5m2"])
def test_casts_of_bytes_are_looked_up(dtype: str, transposed: bool) -> None:
    """Every byte has the interpreter's bits in a product with a matrix of ones and zeros, infinities and NaN too."""

    def make(b: Sketch) -> list[Value]:
        right = b.op(Convert, b.tile(DTYPES[dtype], _TRANSPOSED if transposed else _MATRIX), dtype=BF16)
        return [b.op(Dot, b.tile(BF16, (2, _MATRIX[0])), right, contract=((1,), (int(transposed),)))]

    func = func_of(make)
    values = np.arange(256, dtype=np.uint8).view(DTYPES[dtype])
    wide = values.astype(np.float32)
    order = np.argsort(np.isfinite(wide), kind="stable")  # what is not finite makes a NaN of its row's product with 0
    right = np.zeros(_MATRIX, DTYPES[dtype])
    left = np.zeros((2, _MATRIX[0]), BF16)
    left[0, 3], left[1, 64] = 1, -2
    right[3], right[64] = np.resize(values[order], _MATRIX[1]), np.resize(values[order][::-1], _MATRIX[1])
    operands = {p.ref.shape: right.T.copy() if transposed else right for p in func.inputs if p.ref.dtype != BF16}
    arrays = [operands.get(p.ref.shape, left) for p in func.inputs]
    (wanted,) = interpret(func, *arrays)
    for machine in (None, *here(), *tables_here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), arrays)[0], wanted)
    for machine in (BFLOAT16, TABLES):
        text = LlvmLowering(func, machine).text
        assert ("vpermi2var.qi" in text) == machine.has_byte_tables and "dpbf16ps" in text


def test_odd_functions_take_half_of_the_lookups() -> None:
    """Casts of int8 are looked up by the size of a number; of uint8 by two tables for each of the two bytes."""

    def lookups(dtype: str) -> int:
        def make(b: Sketch) -> list[Value]:
            right = b.op(Convert, b.tile(DTYPES[dtype], _MATRIX), dtype=BF16)
            return [b.op(Dot, b.tile(BF16, (2, _MATRIX[0])), right, contract=((1,), (0,)))]

        return LlvmLowering(func_of(make), TABLES).text.count("vpermi2var.qi.512(<64 x i8> <")

    assert 0 < 2 * lookups("i8") == lookups("u8")


def tables_here() -> list[Machine]:
    return [TABLES] if runs_here(TABLES) else []


# --- half of a byte, as an operand of a product in bfloat16 ----------------------------------------------------------


def as_bfloat16(function: Callable[[Sketch, Value], Value], transposed: bool, depth: int = 66) -> Func:
    """The products of two rows by a matrix of a function of bytes, in bfloat16."""

    def make(b: Sketch) -> list[Value]:
        byte = b.tile(_U8, (300, depth) if transposed else (depth, 300))
        right = b.op(Convert, function(b, byte), dtype=BF16)
        return [b.op(Dot, b.tile(BF16, (2, depth)), right, contract=((1,), (int(transposed),)))]

    return func_of(make)


def splat(b: Sketch, n: float, like: Value) -> Value:
    return b.op(Broadcast, b.splat(n, like.tile.dtype), shape=like.tile.shape, dims=())


def high_half(b: Sketch, x: Value) -> Value:
    """The upper half as a signed number, minus 1 / 2."""
    signed = b.op(Bitcast, x, dtype=_I8)
    high = b.op(Elementwise, signed, splat(b, 4, signed), function="shift_right_arithmetic")
    wide = b.op(Convert, high, dtype=F32)
    return b.op(Elementwise, wide, splat(b, 0.5, wide), function="sub")


def low_half(b: Sketch, x: Value) -> Value:
    """The lower half; infinity for 9."""
    low = b.op(Elementwise, x, splat(b, 15, x), function="and")
    wide = b.op(Convert, low, dtype=F32)
    is_nine = b.op(Elementwise, wide, splat(b, 9, wide), function="eq")
    return b.op(Select, is_nine, splat(b, np.inf, wide), wide)


@pytest.mark.parametrize("depth", [66, 67])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("function", [low_half, high_half])
def test_halves_of_bytes_are_looked_up_in_pairs(
    function: Callable[[Sketch, Value], Value], transposed: bool, depth: int
) -> None:
    """All bytes in every column, in whole vectors of four and in ends; an odd depth has an element without a pair."""
    func = as_bfloat16(function, transposed, depth)
    rng = np.random.default_rng(0)
    left, right = np.zeros((2, depth), BF16), rng.integers(0, 256, (depth, 300)).astype(np.uint8)
    right[right & 15 == 9] ^= 1
    left[0, depth - 1], left[1, 3:5] = 1, (-2, 4)
    right[depth - 1], right[3] = np.resize(np.arange(256), 300), np.resize(np.arange(255, -1, -1), 300)
    left[1, depth - 1] = 0 if function is high_half else 1
    right[3][right[3] & 15 == 9] = 0
    operands = {p.ref.shape: right.T.copy() if transposed else right for p in func.inputs if p.ref.dtype != BF16}
    arrays = [operands.get(p.ref.shape, left) for p in func.inputs]
    (expected,) = interpret(func, *arrays)
    for machine in (None, *here(), *tables_here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), arrays)[0], expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_of_halves_need_products_of_pairs(transposed: bool) -> None:
    """One register holds the table: no tables of bytes are needed. Both halves together are no such function."""
    for machine in (*ALL, TABLES):
        text = LlvmLowering(as_bfloat16(high_half, transposed), machine).text
        assert ("permvar.hi" in text and "dpbf16ps" in text) == machine.has_bfloat16_dots, machine.cpu

    def both(b: Sketch, x: Value) -> Value:
        return b.op(Elementwise, high_half(b, x), low_half(b, x), function="mul")

    assert "permvar.hi" not in LlvmLowering(as_bfloat16(both, transposed), BFLOAT16).text
