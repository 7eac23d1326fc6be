"""Quantisation to 8 and 4 bits, which XLA compiles: no kernel is called."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.kernels.quantization import LARGEST, dequantize, quantize

pytestmark = pytest.mark.one_backend
every_dtype = pytest.mark.parametrize("dtype", LARGEST)
RANDOM = np.random.default_rng(0)


@pytest.mark.sweep(2)
@every_dtype
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((6, 40), (1, None), (6, 1)),
        ((6, 40), (None, 1), (1, 40)),
        ((6, 40), (1, 8), (6, 5)),
        ((3, 6, 40), (2, 10), (3, 3, 4)),
        ((3, 6, 40), (None, None, None), (1, 1, 1)),
    ],
)
def test_values_are_the_nearest(
    dtype: str, given: str, shape: tuple[int, ...], block: tuple[Any, ...], scales: tuple[int, ...]
) -> None:
    x = jnp.asarray(RANDOM.standard_normal(shape), given)
    values, found = quantize(x, block, dtype=dtype)
    assert (values.shape, values.dtype, found.shape, found.dtype) == (shape, jnp.dtype(dtype), scales, jnp.float32)
    steps = dequantize(jnp.ones(shape), found)
    off = jnp.abs(dequantize(values, found) - x.astype(jnp.float32))
    numbers = jnp.abs(x.astype(jnp.float32)) / steps
    # Half the distance of neighbours: 1 of integers; of floats a share of the number, and that of the least numbers.
    bits, least = {"float8_e4m3fn": (3, 2**-9), "float8_e5m2": (2, 2**-16), "float4_e2m1fn": (1, 0.5)}.get(
        dtype, (0, 1)
    )
    distance = jnp.maximum(numbers * 2.0**-bits, least) if bits else 1.0
    assert (off <= (distance / 2 + 4 * jnp.finfo(jnp.float32).eps * numbers) * steps).all()


@every_dtype
def test_the_largest_number_of_a_block_is_that_of_the_dtype(dtype: str) -> None:
    x = jnp.asarray(RANDOM.standard_normal((4, 32)), jnp.float32)
    values, _ = quantize(x, (1, 16), dtype=dtype)
    largest = jnp.abs(values.astype(jnp.float32)).reshape(4, 2, 16).max(-1)
    np.testing.assert_array_equal(largest, np.full((4, 2), LARGEST[dtype]))


@every_dtype
def test_blocks_of_zeros_and_of_tiny_and_odd_numbers(dtype: str) -> None:
    x = jnp.array([[0.0, -0.0], [1e-40, -1e-42], [3e38, -3e38], [np.nan, 1.0]], jnp.float32)
    values, scales = quantize(x, (1, None), dtype=dtype)
    assert (values[:2].astype(jnp.float32) == 0).all()
    np.testing.assert_array_equal(scales[:2], [[1], [1]])
    np.testing.assert_array_equal(values[2].astype(jnp.float32), [LARGEST[dtype], -LARGEST[dtype]])
    assert jnp.isfinite(dequantize(values, scales)[:3]).all()
    assert np.isnan(scales[3, 0])


def test_derivatives_take_the_results_as_constants() -> None:
    def straight_through(x: Any) -> Any:
        return (x + jax.lax.stop_gradient(dequantize(*quantize(x, (1, None))) - x)).sum() + quantize(x, (1, None))[
            1
        ].sum()

    assert (jax.grad(straight_through)(jnp.ones((2, 3))) == 1).all()


def test_no_numbers() -> None:
    values, scales = quantize(jnp.zeros((0, 40)), (1, 8))
    assert (values.shape, scales.shape) == ((0, 40), (0, 5))


def test_scales_have_a_derivative() -> None:
    values, scales = quantize(jnp.arange(12.0).reshape(2, 6), (1, 3))
    found = jax.grad(lambda scales: dequantize(values, scales).sum())(scales)
    np.testing.assert_array_equal(found, values.astype(jnp.float32).reshape(2, 2, 3).sum(-1))


@pytest.mark.parametrize(
    ("x", "block", "dtype", "got"),
    [
        (jnp.zeros((2, 6), jnp.int32), (1, None), "int8", "x = int32[2, 6]"),
        (jnp.zeros((2, 6)), (1, 4), "int8", "block = (1, 4)"),
        (jnp.zeros((2, 6)), (1, 1, 2), "int8", "block = (1, 1, 2)"),
        (jnp.zeros((2, 6)), (1, 0), "int8", "block = (1, 0)"),
        (jnp.zeros((2, 6)), (1, 2.0), "int8", "block = (1, 2.0)"),
        (jnp.zeros((2, 6)), (1, 2), "int16", "dtype = 'int16'"),
        (jnp.zeros((2, 6)), (1, 2), "narrow", "dtype = 'narrow'"),
    ],
)
def test_arguments_that_do_not_fit(x: Any, block: Any, dtype: str, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        quantize(x, block, dtype=dtype)  # here
    assert "# here" in caught.value.loc.snippet()


def test_scales_that_do_not_divide() -> None:
    with pytest.raises(ArgumentError, match=re.escape("scales = float32[2, 4]")):
        dequantize(jnp.zeros((2, 6), jnp.int8), jnp.ones((2, 4)))
