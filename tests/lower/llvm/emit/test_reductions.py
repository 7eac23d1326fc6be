"""Positions of extremes, and the order of sums."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.llvm.machines import here
from tests.lower.llvm.running import run
from tilekern.ir.parse import parse
from tilekern.lower.llvm.lowering import LlvmLowering

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

pytest.importorskip("llvmlite", reason="needs llvmlite")


@pytest.mark.parametrize("extreme", ["max", "min"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["f32", "i32", "bf16", "u8"])
def test_the_first_of_equal_elements_is_the_position(dtype: str, dim: int, extreme: str) -> None:
    """Rows and columns of few numbers, so that most extremes are there more than once."""
    func = parse(f"""
func @extremes(%x: ref<{dtype}[37, 41], in>, %out: ref<i32[{(41, 37)[dim]}], out>) {{
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 37!, 0 +: 41!] : {dtype}[37, 41]
  %1 = arg_reduce(%0) {{extreme="{extreme}", dim={dim}}} : i32[{(41, 37)[dim]}]
  store %1 to %out[0 +: {(41, 37)[dim]}!]
}}""")
    x = np.random.default_rng(dim).integers(0, 3, (37, 41)).astype(func.inputs[0].ref.dtype)
    wide = x.astype(np.float64)
    wanted = wide.argmax(dim) if extreme == "max" else wide.argmin(dim)
    for machine in (None, *here()):
        np.testing.assert_array_equal(run(LlvmLowering(func, machine), [x])[0], wanted)


@pytest.mark.parametrize("columns", [64, 80, 112, 127, 256])
def test_a_long_row_of_an_array_has_one_sum_in_tiles_of_any_height(columns: int) -> None:
    """Rows of four vectors and more come one after the other: the order of a row's sum is that of a tile of one row."""

    def sums(rows: int) -> np.ndarray:
        func = parse(f"""
func @sums(%x: ref<f32[8, {columns}], in>, %out: ref<f32[8], out>) {{
  grid %i in i[8 by {rows}]
  %0 = load %x[{rows}*%i +: {rows}!, 0 +: {columns}!] : f32[{rows}, {columns}]
  %1 = reduce(%0) {{monoid="sum", dims=[1]}} : f32[{rows}]
  store %1 to %out[{rows}*%i +: {rows}!]
}}""")
        return run(LlvmLowering(func), [x])[0]

    x = np.random.default_rng(columns).standard_normal((8, columns)).astype(np.float32)
    of_single_rows = sums(1)
    np.testing.assert_allclose(of_single_rows, x.astype(np.float64).sum(1), rtol=0, atol=1e-6 * columns)
    for rows in (2, 4, 8):
        np.testing.assert_array_equal(sums(rows), of_single_rows)
