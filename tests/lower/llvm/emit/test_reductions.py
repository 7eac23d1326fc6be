"""Positions of extremes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.llvm.machines import here
from tests.lower.llvm.running import run
from tilekern.ir.parse import parse
from tilekern.lower.llvm.lowering import LlvmLowering

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
