"""Programs that the XLA backend runs at once."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import tilekern as tk


@tk.kernel(out_type=lambda x, y: jax.ShapeDtypeStruct((2, 3), x.dtype))
def printed(x: tk.Ref, y: tk.Ref, out: tk.Ref) -> None:
    i, j = tk.parallel(2), tk.parallel(3)
    out[i, j] = x[i] + y[j]
    tk.debug_print("{} {} {}", x[i], y[j], x[i] + y[j])


def test_a_print_has_the_operands_of_each_program(capfd: pytest.CaptureFixture[str]) -> None:
    """One operand differs along the first axis alone, one along the second, one along both."""
    x, y = np.array([10, 20], np.int32), np.array([1, 2, 3], np.int32)
    printed(x, y, target="cpu:xla")
    jax.effects_barrier()
    lines = re.findall(r"(\d+) (\d+) (\d+)", capfd.readouterr().out)
    assert sorted(tuple(map(int, line)) for line in lines) == [(a, b, a + b) for a in (10, 20) for b in (1, 2, 3)]


def test_functions_of_8_bit_floats_end_loops_of_xla() -> None:
    """LLVM took six minutes for the quotient as one loop."""

    @tk.kernel(out_type=lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def quotients(x: tk.Ref, y: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 8)
        out[i] = x[i] // y[i]

    x, y = (np.float32(numbers).astype("float8_e4m3fn") for numbers in ([7, -7, 0.5, 9, -1], [2, 2, -3, 0.25, 5]))
    traced = quotients.trace(x, y)
    lowered = traced.lower("cpu:xla")
    assert lowered.text.count("optimization_barrier") >= 6  # rem, sub, div, sign, sign, sub
    np.testing.assert_array_equal(lowered.interpret(x, y), traced.interpret(x, y))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_sums_of_8_bit_floats_are_rounded_once(dtype: str) -> None:
    @tk.kernel(out_type=lambda x, y: jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), x.dtype))
    def sums(x: tk.Ref, y: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 64)
        out[i, :] = x[i][:, None] + y[:][None]

    every = np.arange(256, dtype=np.uint8).view(dtype)
    wide = every.astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected = (wide[:, None] + wide).astype(dtype)
    np.testing.assert_array_equal(
        np.asarray(sums(every, every, target="cpu:xla")).astype(float), expected.astype(float)
    )
