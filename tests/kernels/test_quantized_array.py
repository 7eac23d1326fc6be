"""Quantised arrays: XLA compiles them, no kernel is called."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.kernels import QuantizedArray
from tilekern.kernels.quantization import LARGEST, quantize

pytestmark = pytest.mark.one_backend
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((6, 64)).astype(np.float32)
INTEGERS = ("int8", "int4")


def blocks_of(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """x[M, K] as [M / m, K / k, m · k]."""
    (rows, inner), (m, k) = x.shape, block
    return x.reshape(rows // m, m, inner // k, k).transpose(0, 2, 1, 3).reshape(rows // m, inner // k, m * k)


def from_blocks(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    (a, b, _), (m, k) = x.shape, block
    return x.reshape(a, b, m, k).transpose(0, 2, 1, 3).reshape(a * m, b * k)


def quantised(x: np.ndarray, dtype: str, block: tuple[int, int], scales: np.ndarray) -> np.ndarray:
    """The values of the reference, by NumPy and ml_dtypes, for scales[M / m, K / k]."""
    scaled = np.clip(blocks_of(x, block) / scales.astype(np.float32)[..., None], -LARGEST[dtype], LARGEST[dtype])
    values = np.rint(scaled).astype(np.int8) if dtype in INTEGERS else scaled.astype(getattr(ml_dtypes, dtype))
    return from_blocks(values, block).astype(np.float32)


def scales_of(x: np.ndarray, dtype: str, block: tuple[int, int], scale_dtype: str) -> np.ndarray:
    """The scales of the reference."""
    scales = np.abs(blocks_of(x, block)).max(2) / np.float32(LARGEST[dtype])
    if scale_dtype == "float8_e8m0fnu":
        scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64)))).astype(np.float32)
    if scale_dtype == "float8_e4m3fn":
        scales = np.maximum(scales, np.float32(2**-9))
    return scales.astype(jnp.dtype(scale_dtype)).astype(np.float32)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("block", [(1, 64), (6, 1), (6, 64), (1, 32), (2, 16)])
def test_values_are_those_of_the_reference(dtype: str, block: tuple[int, int], scale_dtype: str) -> None:
    found = jax.jit(lambda x: QuantizedArray.quantize(x, dtype, block=block, scale_dtype=scale_dtype))(X * 40)
    assert (found.shape, found.dtype, found.block) == (X.shape, jnp.dtype(dtype), block)
    scales = np.asarray(found.scales.astype(jnp.float32))
    # XLA divides by a constant as it multiplies by its reciprocal, so float32 scales may be the next number.
    rtol = 2 * np.finfo(np.float32).eps if scale_dtype == "float32" else 0
    np.testing.assert_allclose(scales, scales_of(X * 40, dtype, block, scale_dtype), rtol=rtol)
    np.testing.assert_array_equal(found.values.astype(jnp.float32), quantised(X * 40, dtype, block, scales))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_zero_points_keep_zeros_exact_and_use_the_range(dtype: str, scale_dtype: str) -> None:
    x = np.abs(X) + 1
    x[:, 3] = 0
    low, high = {"int8": (-128, 127), "int4": (-8, 7)}[dtype]
    options: dict[str, Any] = {"axis": -1, "zero_point": True, "scale_dtype": scale_dtype}
    found = QuantizedArray.quantize(jnp.asarray(x), dtype, **options)
    assert found.zero_points is not None and found.zero_points.dtype == found.values.dtype
    scales, zeros, values = (np.asarray(a.astype(jnp.float32)) for a in (found.scales, found.zero_points, found.values))
    np.testing.assert_array_equal(zeros, np.clip(np.rint(low - x.min(1, keepdims=True) / scales), low, high))
    np.testing.assert_array_equal(values, np.clip(np.rint(x / scales + zeros), low, high))
    assert (found.dequantize()[:, 3] == 0).all()
    # A scale of bfloat16 may be rounded down, so that the largest numbers are clamped.
    may_be_clamped = (scale_dtype == "bfloat16") & ((values == low) | (values == high))
    assert ((np.abs(found.dequantize() - x) <= scales * 0.501) | may_be_clamped).all()
    assert not may_be_clamped.all()


def test_axes_are_blocks() -> None:
    x = jnp.asarray(X).reshape(2, 3, 64)
    for axis, block in ((-1, (1, 1, 64)), (1, (1, 3, 1)), ((0, 2), (2, 1, 64)), (None, (2, 3, 64))):
        found = QuantizedArray.quantize(x, axis=axis)
        assert found.block == block
        np.testing.assert_array_equal(found.values, quantize(x, block)[0])


def test_zeros_tiny_numbers_and_nan() -> None:
    x = jnp.array([[0.0, -0.0], [1e-40, -1e-42], [3e38, -3e38], [np.nan, 1.0]], jnp.float32)
    for scale_dtype in ("float32", "bfloat16", "float8_e8m0fnu"):
        for zero_point in (False, True):
            found = QuantizedArray.quantize(x, "int8", axis=1, scale_dtype=scale_dtype, zero_point=zero_point)
            whole = found.dequantize()
            assert (whole[:2] == 0).all() and jnp.isfinite(found.scales[:3].astype(jnp.float32)).all()
            assert np.isnan(found.scales[3].astype(jnp.float32)).all() or zero_point


def test_it_is_a_pytree_and_a_constant_for_derivatives() -> None:
    stacked = jnp.stack([X, 2 * X])
    found = jax.vmap(lambda x: QuantizedArray.quantize(x, axis=-1))(stacked)
    assert [a.shape for a in jax.tree.leaves(found)] == [(2, 6, 64), (2, 6, 1)]
    _, whole = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, found)
    np.testing.assert_array_equal(whole[0], QuantizedArray.quantize(stacked[0], axis=-1).dequantize())
    assert (jax.grad(lambda x: QuantizedArray.quantize(x).dequantize().sum())(stacked) == 0).all()


# --- arrays of other libraries ----------------------------------------------------------------------------------------


@dataclass
class QArray:
    """The attributes of qwix's."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None


@dataclass
class QTensor:
    """The attributes of AQT's."""

    qvalue: Any
    scale: Any
    scale_t: Any = None
    bias: list[Any] = field(default_factory=list)
    tiling_state: Any = None


VALUES = jnp.arange(-12, 12, dtype=jnp.int8).reshape(4, 6)
SCALES = jnp.linspace(0.5, 2, 8).reshape(4, 2)


def test_arrays_of_qwix() -> None:
    zeros = jnp.arange(8, dtype=jnp.int8).reshape(4, 2)
    found = QuantizedArray.of(QArray(VALUES, SCALES, zeros, "int8"))
    wide = np.asarray(VALUES, np.float32) - np.repeat(zeros, 3, 1)
    np.testing.assert_array_equal(found.dequantize(), wide * np.repeat(SCALES, 3, 1))


def test_arrays_of_aqt() -> None:
    """values * scale[0] * scale[1] - bias[0]."""
    rows, columns, bias = SCALES[:, :1], SCALES[0, :1].reshape(1, 1), SCALES[:, 1:]
    found = QuantizedArray.of(QTensor(VALUES, [rows, columns], bias=[bias]))
    expected = np.asarray(VALUES, np.float32) * rows * columns - bias
    np.testing.assert_allclose(found.dequantize(), expected, rtol=1e-5, atol=1e-5)
    plain = QuantizedArray.of(QTensor(VALUES, [rows]))
    np.testing.assert_array_equal(plain.dequantize(), np.asarray(VALUES, np.float32) * rows)


def test_an_array_of_ours_stays() -> None:
    ours = QuantizedArray(VALUES, SCALES)
    assert QuantizedArray.of(ours) is ours


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        QArray(VALUES.astype(jnp.float32), SCALES),
        QArray(VALUES, SCALES, qtype="nf4"),
        QTensor(VALUES, None),
        QTensor(VALUES, [SCALES], tiling_state="tiles"),
        jnp.ones(3),
    ],
)
def test_arrays_that_are_not_read(array: Any) -> None:
    with refused(ArgumentError, "this is no quantised array that tilekern reads"):
        QuantizedArray.of(array)  # <-


@pytest.mark.parametrize(
    ("keywords", "summary"),
    [
        ({"block": (1, 48)}, "the blocks of QuantizedArray.quantize do not divide the array"),
        ({"axis": 2}, "QuantizedArray.quantize cannot take this axis"),
        ({"axis": 1, "block": (1, 32)}, "QuantizedArray.quantize cannot take this axis"),
        ({"scale_dtype": "int8"}, "QuantizedArray.quantize has no scales of this dtype"),
        ({"dtype": "int16"}, "QuantizedArray.quantize has no values of this dtype"),
        ({"dtype": "float8_e4m3fn", "zero_point": True}, "floats have no zero point"),
    ],
)
def test_arguments_of_quantize(keywords: Any, summary: str) -> None:
    with refused(ArgumentError, summary):
        QuantizedArray.quantize(jnp.asarray(X), **keywords)  # <-


def test_integers_are_not_quantised() -> None:
    with refused(ArgumentError, "the arrays of QuantizedArray.quantize do not fit"):
        QuantizedArray.quantize(VALUES)  # <-


def test_scales_that_do_not_fit() -> None:
    for scales, zeros in ((SCALES[0], None), (SCALES[:3], None), (SCALES, VALUES[:, :1]), (VALUES[:, :2], None)):
        with refused(ArgumentError, "the scales of the array of QuantizedArray.dequantize do not fit its values"):
            QuantizedArray(VALUES, scales, zeros).dequantize()  # <-
