"""Programs that the XLA backend runs at once."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first


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


@pytest.mark.parametrize(("squares", "barriers"), [(24, 0), (25, 1), (49, 1), (50, 2)])
def test_a_value_with_more_than_30_million_paths_is_an_array(squares: int, barriers: int) -> None:
    """A square doubles the paths, and the array has one. LLVM followed each path, and did not end in half an hour."""

    @like_first
    def powers(x: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 4)
        value = x[i]
        for _ in range(squares):
            value = value * value
        out[i] = value

    x = np.arange(6, dtype=np.uint32)
    lowered = powers.trace(x).lower("cpu:xla")
    assert lowered.text.count("optimization_barrier") == 2 * barriers  # of the full tile, and of the ragged one
    np.testing.assert_array_equal(powers(x, target="cpu:xla"), lowered.interpret(x))


def test_random_bits_and_loads_at_their_places_end_loops_of_xla() -> None:
    """In each of 20 rounds of Threefry a word is used three times."""

    @like_first
    def shuffled(x: tk.Ref, key: tk.Ref, out: tk.Ref, *, times: int) -> None:
        i = tk.parallel(x.shape[0], 4)
        value = i.indices
        for _ in range(times):
            value = x[(tk.random_bits(key[:], value) % 6).astype(np.int32)]
        out[i] = value

    x, key = np.arange(6, dtype=np.int32), np.uint32([3, 4])
    counts = []
    for times in (1, 3):
        lowered = shuffled.trace(x, key, times=times).lower("cpu:xla")
        counts.append(lowered.text.count("optimization_barrier"))
        np.testing.assert_array_equal(shuffled(x, key, times=times, target="cpu:xla"), lowered.interpret(x, key))
    assert 2 <= counts[0] < counts[1] / 2
