"""Warps by the largest tile, or by the largest dot."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.lower.triton.kernels import LIKE, matmul
from tests.lower.triton.running import program_of
from tilekern.ir.parse import parse
from tilekern.lower.triton.plan.launch_options import default_warps
from tilekern.passes import pipeline

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

COPY = """
func @f(%x: ref<f32[{size}], in>, %o: ref<f32[{size}], out>) {{
  %a = load %x[0 +: {size}!] : f32[{size}]
  store %a to %o[0 +: {size}!]
}}"""


@pytest.mark.parametrize(("size", "warps"), [(1, 1), (512, 1), (513, 2), (1024, 2), (2048, 4), (4096, 8), (2**16, 8)])
def test_warps_by_the_size_of_tiles(size: int, warps: int) -> None:
    assert program_of(parse(COPY.format(size=size))).num_warps == warps


@pytest.mark.parametrize(("block", "warps"), [(64, 4), (128, 8)])
def test_warps_by_the_size_of_dots(block: int, warps: int) -> None:
    x = LIKE((256, 256), jnp.bfloat16)
    func = pipeline.run(matmul.trace(x, x, block_m=block, block_n=block).ir)
    assert default_warps(func, 32) == warps
    assert default_warps(func, 64) == warps // 2  # as many threads


@pytest.mark.parametrize(("size", "warps"), [(1024, 1), (1025, 2), (4096, 4), (2**16, 4)])
def test_warps_of_64_threads(size: int, warps: int) -> None:
    func = pipeline.run(parse(COPY.format(size=size)))
    assert default_warps(func, 64) == warps
