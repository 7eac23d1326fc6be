"""Bitcasts between dtypes of different widths, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.lang.checks import COMPILED, EXTENTS, kernel
from tilekern.ir.types import BOOL, DTYPES

NUMBERS = [dtype for dtype in DTYPES.values() if dtype != BOOL]
WIDTHS = [(a, b) for a, b in itertools.product(NUMBERS, NUMBERS) if a.itemsize != b.itemsize]


def anything(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Numbers with random bits, including NaN."""
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Bits that are normal numbers in every float dtype: machines change the bits of NaN, and flush subnormals."""
    rng, count = np.random.default_rng(1), int(np.prod(shape)) * dtype.itemsize
    return (
        (rng.integers(0x10, 0x70, count) + 0x80 * rng.integers(0, 2, count)).astype(np.uint8).view(dtype).reshape(shape)
    )


def cast(function: Callable[[Any], Any], x: np.ndarray) -> tuple[tk.Kernel, np.ndarray]:
    """Make a kernel that applies a function to rows, and compute JAX's result."""
    expected = np.asarray(function(jnp.asarray(x)))

    @kernel((expected.shape, expected.dtype))
    def cast(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = function(x[i])

    return cast, expected


def same(got: Any, expected: np.ndarray) -> None:
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e"])
@pytest.mark.parametrize(
    ("source", "dtype", "shape"),
    [
        ("f32", "bf16", (9, 8)),
        ("f32", "u8", (5, 3)),
        ("u8", "f32", (9, 8, 4)),
        ("bf16", "u32", (5, 2)),
        ("f8e5m2", "f16", (5, 3, 2)),
    ],
)
def test_every_backend_takes_the_low_bits_first(source: str, dtype: str, shape: tuple[int, ...], target: str) -> None:
    if target != "cpu:xla":
        module = {"cpu:llvm": "llvmlite", "cuda:sm_90": "triton", "tpu:v5e": "libtpu"}[target]
        pytest.importorskip(module, reason=f"needs {module}")
    x = normal(shape, DTYPES[source])
    made, expected = cast(lambda x: lax.bitcast_convert_type(x, DTYPES[dtype]), x)
    same(made.trace(x).lower(target).interpret(x), expected)


@COMPILED
@given(st.sampled_from(WIDTHS), EXTENTS, st.integers(0, 3), st.integers(0, 9))
def test_any_two_widths(dtypes: tuple[np.dtype[Any], np.dtype[Any]], extent: int, inner: int, seed: int) -> None:
    source, dtype = dtypes
    last = (dtype.itemsize // source.itemsize,) if source.itemsize < dtype.itemsize else ()
    x = anything((extent, inner, *last), source, seed)
    with jax.enable_x64(True):
        made, expected = cast(lambda x: lax.bitcast_convert_type(x, dtype), x)
        same(tk.interpret(made.trace(x))(x), expected)
        if source.kind in "iu" and dtype.kind in "iu":  # floats may lose a NaN's bits on their way through XLA
            same(made(x, target="cpu:xla"), expected)


@pytest.mark.smoke
def test_views() -> None:
    x = anything((6, 8), np.dtype(np.int32))
    for function in (
        lambda x: x.view(jnp.uint8),
        lambda x: x.view(jnp.int16) + 1,
        lambda x: x.view(jnp.int8).view("u2"),
    ):
        made, expected = cast(function, x)
        same(made(x), expected)
        same(tk.interpret(made.trace(x))(x), expected)
