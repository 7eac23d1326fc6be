"""A computed tile, moved, and combined with itself: code does what the interpreter does, in every bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.lower.llvm.plan.moved_tiles import COMBINATIONS, KERNELS, MOVEMENTS, kernel, operand
from tests.lower.llvm.running import run
from tilekern.ir.interpret import interpret
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")


def wrong_movements(producer: str, shape: tuple[int, int], dtype: str, combination: str) -> list[str]:
    """The movements with which code computes other numbers than the interpreter."""
    with jax.enable_x64(True):
        x = operand(shape, dtype)
        func = kernel(producer, combination).trace(x).ir
        (expected,), (found,) = interpret(func, x, orders=1), run(LlvmLowering(func), [x])
    return [m for m, got, want in zip(MOVEMENTS, found, expected, strict=True) if not np.array_equal(got, want)]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize(("producer", "shape", "dtype"), KERNELS)
def test_a_moved_tile_beside_itself(producer: str, shape: tuple[int, int], dtype: str, combination: str) -> None:
    assert not wrong_movements(producer, shape, dtype, combination)
