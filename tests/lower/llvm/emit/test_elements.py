"""Masked vectors of which few lanes are left, where LLVM once stored more than the mask allowed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.lower.llvm.machines import here
from tests.lower.llvm.running import Canaries, Memory, run
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")

# Rows of `width` elements in tiles of 16: of the last one few lanes are stored, and behind them begins another row.
ROWS = """
func @rows(%x: ref<{dtype}[5, {width}], in>, %out: ref<{dtype}[5, {width}], out>) {{
  grid %i in i[5 by 1], %j in j[{width} by 16]
  %0 = load %x[%i, 16*%j +: 16] : {dtype}[16]
  store %0 to %out[%i, 16*%j +: 16]
}}"""


@pytest.mark.parametrize("width", [1, 2, 3, 15, 17, 18, 19, 31, 33])
@pytest.mark.parametrize("dtype", ["i8", "f8e5m2", "bf16", "f16", "i16", "f32", "f64"])
def test_lanes_beyond_an_edge_stay_as_they_are(dtype: str, width: int) -> None:
    """In several orders of tasks, so that what one stores too much is not stored over again by the next."""
    func = parse(ROWS.format(dtype=dtype, width=width))
    (param,) = func.inputs
    x = (np.arange(5 * width) % 60 + 1).astype(param.ref.dtype).reshape(5, width)
    for machine in (None, *here()):
        lowering = LlvmLowering(func, machine)
        for order in (None, 1, 2):
            place = Canaries()
            (found,) = run(lowering, [x], place, seed=order)
            assert found.tobytes() == x.tobytes() and place.untouched(), (machine, order)


@pytest.mark.parametrize("columns", [17, 18, 19, 33])
def test_softmax_of_rows_of_one_block_and_a_little(columns: int) -> None:
    """LLVM 22 stores 32 bits for a vector of 16-bit elements whose mask is known to have one lane."""
    x = np.random.default_rng(0).standard_normal((64, columns)).astype(ml_dtypes.bfloat16)
    func = softmax_forward.trace(x, block_rows=64, block_columns=16).lower("cpu:xla").ir
    wide = np.exp(x.astype(np.float64))
    for machine in (None, *here()):
        place = Canaries()
        (found,) = run(LlvmLowering(func, machine), [x], place)
        np.testing.assert_allclose(found.astype(np.float64), wide / wide.sum(1, keepdims=True), rtol=2**-7)
        assert place.untouched(), machine


# A tile of 8 by 8 lanes, of which the array has 5 by `width`: the others are stored as 0.
CORNER = """
func @corner(%x: ref<{dtype}[5, {width}], in>, %out: ref<{dtype}[8, 8], out>) {{
  grid %i in i[5 by 8], %j in j[{width} by 8]
  %0 = load %x[8*%i +: 8, 8*%j +: 8] : {dtype}[8, 8]
  %1 = add(%0, %0) : {dtype}[8, 8]
  store %1 to %out[0 +: 8, 0 +: 8]
}}"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("dtype", ["f32", "i64", "f64"])
def test_lanes_of_rows_and_columns_beyond_an_array_are_zero(dtype: str, width: int) -> None:
    """LLVM 22 for AVX2 reads masked lanes if a register's part of the mask is a constant, but not the whole mask."""
    func = parse(CORNER.format(dtype=dtype, width=width))
    x = np.arange(1, 5 * width + 1).astype(func.inputs[0].ref.dtype).reshape(5, width)
    wanted = np.zeros((8, 8), x.dtype)
    wanted[:5, :width] = x + x
    for machine in (None, *here()):
        (found,) = run(LlvmLowering(func, machine), [x], Canaries())
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["bool", "i8", "bf16", "f8e5m2", "f64"])
def test_tiles_whose_elements_take_turns(dtype: str, count: int) -> None:
    """Vectors of several tiles become one vector, of any number of lanes."""
    for width in (1, 5, 19, 64):
        parts = "".join(
            f"  %{n} = load %x[{n}!, 0 +: 3!, 0 +: {width}!, 0 +: 1!] : {dtype}[3, {width}, 1]\n" for n in range(count)
        )
        func = parse(
            f"func @turns(%x: ref<{dtype}[{count}, 3, {width}, 1], in>, "
            f"%out: ref<{dtype}[3, {width}, {count}], out>) {{\n"
            f"{parts}  %9 = concatenate({', '.join(f'%{n}' for n in range(count))}) {{dim=2}} : "
            f"{dtype}[3, {width}, {count}]\n  store %9 to %out[0 +: 3!, 0 +: {width}!, 0 +: {count}!]\n}}"
        )
        x = (np.arange(count * 3 * width) % 50 % 7).astype(func.inputs[0].ref.dtype).reshape(count, 3, width, 1)
        for machine in (None, *here()):
            (found,) = run(LlvmLowering(func, machine), [x], Canaries())
            assert found.tobytes() == np.concatenate([*x], 2).tobytes(), (width, machine)


def test_a_stray_store_is_found() -> None:
    place = Canaries()
    memory = place(10)
    memory.array((10,), np.uint8)[...] = 0
    assert place.untouched()
    Memory(memory.address + 10, 1, memory.owner).array((1,), np.uint8)[...] = 0
    assert not place.untouched()


@pytest.mark.parametrize("dtype", ["i8", "bf16", "f32", "f64"])
def test_reversed_tiles(dtype: str) -> None:
    """Whole vectors are loaded, of an array and of a tile in memory, and turned around."""
    func = parse(f"""
func @reversed(%x: ref<{dtype}[67], in>, %out: ref<{dtype}[64], out>, %sums: ref<{dtype}[64], out>) {{
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 64] : {dtype}[64]
  %1 = reverse(%0) {{dims=[0]}} : {dtype}[64]
  store %1 to %out[0 +: 64]
  %2 = scan(%0) {{monoid="max", dim=0, reverse=false}} : {dtype}[64]
  %3 = reverse(%2) {{dims=[0]}} : {dtype}[64]
  store %3 to %sums[0 +: 64]
}}""")
    (param,) = func.inputs
    x = np.random.default_rng(0).permutation(67).astype(param.ref.dtype)
    largest = np.maximum.accumulate(x[:64].astype(np.float64))
    for machine in (None, *here()):
        out, sums = run(LlvmLowering(func, machine), [x])
        np.testing.assert_array_equal(out, x[:64][::-1])
        np.testing.assert_array_equal(sums.astype(np.float64), largest[::-1])


def test_digits_of_negative_positions() -> None:
    """Quotients round down and remainders are not negative, as Python's; the interpreter reads the same rows."""
    func = parse("""
func @digits(%n: ref<i32[16], in>, %x: ref<f32[16, 16], in>, %out: ref<f32[16, 4], out>) {
  grid %i in i[16 by 1]
  %0 = load %n[%i!] : i32[]
  %1 = load %x[(%0 // 3) + 8, 4*(%0 // 2 % 3) +: 4] : f32[4]
  store %1 to %out[%i!, 0 +: 4!]
}""")
    n = np.arange(-11, 5, dtype=np.int32)
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    wanted = np.stack([x[int(i) // 3 + 8, 4 * (int(i) // 2 % 3) :][:4] for i in n])
    np.testing.assert_array_equal(interpret(func, n, x)[0], wanted)
    for machine in (None, *here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), [n, x])[0], wanted)


@pytest.mark.parametrize("steps", [300, 1200])
def test_chains_of_fused_ops_are_longer_than_the_stack_of_python(steps: int) -> None:
    """A sum over taps that Python's `for` unrolls: each step adds to the one before, and reads a scalar."""
    lines = "\n".join(
        f"""
          %s{n} = load %w[{n % 7}] : i32[]
          %b{n} = broadcast(%s{n}) {{dims=[]}} : i32[4, 32]
          %m{n} = mul(%x{n}, %b{n}) : i32[4, 32]
          %x{n + 1} = add(%m{n}, %x0) : i32[4, 32]"""
        for n in range(steps)
    )
    func = parse(
        f"""
        func @chain(%w: ref<i32[7], in>, %x: ref<i32[12, 32], in>, %out: ref<i32[12, 32], out>) {{
          grid %i in i[12 by 4]
          %x0 = load %x[4*%i +: 4, 0 +: 32] : i32[4, 32]
          {lines}
          store %x{steps} to %out[4*%i +: 4, 0 +: 32]
        }}"""
    )
    random = np.random.default_rng(0)
    w, x = (random.integers(-9, 9, shape).astype(np.int32) for shape in ((7,), (12, 32)))
    (found,) = LlvmLowering(func).interpret(w, x)
    np.testing.assert_array_equal(found, interpret(func, w, x)[0])


# Rows that a table names, of which some are no rows of the array: all lanes of such a row are 0.
NAMED = """
func @named(%x: ref<{dtype}[5, 40], in>, %table: ref<i32[6], in>, %out: ref<{dtype}[6, 40], out>) {{
  grid %i in i[6 by 1]
  %0 = load %table[%i] : i32[]
  %1 = load %x[%0, 0 +: 40] : {dtype}[40]
  store %1 to %out[%i, 0 +: 40]
}}"""


@pytest.mark.parametrize("dtype", ["i8", "bf16", "f32", "f64", "bool"])
def test_rows_that_are_in_bounds_or_not(dtype: str) -> None:
    """Without AVX-512 no load is masked: the row, or zeros, are loaded."""
    func = parse(NAMED.format(dtype=dtype))
    x = (np.arange(5 * 40) % 60 + 1).astype(func.inputs[0].ref.dtype).reshape(5, 40)
    table = np.array([3, -1, 0, 5, 4, 2**31 - 1], np.int32)
    (wanted,) = interpret(func, x, table)
    for machine in (None, *here()):
        lowering = LlvmLowering(func, machine)
        (found,) = run(lowering, [x, table])
        np.testing.assert_array_equal(found, wanted)
        assert ("masked.load" in lowering.text) == (lowering.machine.vector_bytes == 64)
