import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.kernels.rms_norm import reference, rms_norm_quantized
from tilekern.kernels.rms_norm.quantized import rms_norm_quantized_forward
from tilekern.testing import in_float64

DTYPES = {"int8": 127.0, "float8_e4m3fn": 448.0}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 37), (3, 128), (2, 3, 19), (7,), (0, 4)])
def test_values_are_the_nearest(dtype: str, given: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.standard_normal(s), given) for s in (shape, shape[-1:]))
    values, scales = rms_norm_quantized(x, weight, out_dtype=dtype, offset=1.0)
    assert (values.dtype, values.shape, scales.shape) == (jnp.dtype(dtype), shape, shape[:-1])
    oracle = np.asarray(in_float64(lambda x, w: reference(x, w, offset=1.0), x, weight))
    largest = np.abs(oracle).max(axis=-1, initial=0)
    few = 8 * np.finfo(np.float32).eps
    np.testing.assert_allclose(scales, largest / DTYPES[dtype], rtol=few)
    numbers, step = np.asarray(values, np.float64), np.asarray(scales, np.float64)[..., None]
    # Half a step of int8; of float8 half of the last of three bits behind the point, or half of the least number.
    half = 0.5 if dtype == "int8" else np.maximum(np.abs(oracle) / step / 16, 2.0**-10)
    assert (np.abs(numbers * step - oracle) <= half * step + few * largest[..., None]).all()


@every_dtype
def test_rows_of_zeros_and_of_nan(dtype: str) -> None:
    x = jnp.array([[0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]])
    values, scales = rms_norm_quantized(x, out_dtype=dtype)
    assert (np.asarray(values[0], np.float32) == 0).all()
    assert scales[0] == 1
    np.testing.assert_array_equal(np.asarray(values[1], np.float32), [DTYPES[dtype], -DTYPES[dtype]])
    assert np.isnan(scales[2])


@every_dtype
@pytest.mark.parametrize("block", [4, 1, 24])
def test_blocks_have_scales_of_their_own(dtype: str, block: int) -> None:
    """As if each block were a row, but for the norm, which is of all of them."""
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(s).astype(np.float32) for s in ((2, 3, 24), (24,)))
    x[0, 0, :block] = 0
    values, scales = rms_norm_quantized(x, weight, out_dtype=dtype, block=block)
    assert (values.shape, scales.shape) == (x.shape, (2, 3, 24 // block))
    parts = np.asarray(in_float64(reference, x, weight)).reshape(2, 3, -1, block)
    largest = np.abs(parts).max(axis=-1)
    np.testing.assert_allclose(
        scales, np.where(largest == 0, 1, largest / DTYPES[dtype]), rtol=8 * np.finfo(np.float32).eps
    )
    found = np.asarray(values, np.float64).reshape(parts.shape) * np.asarray(scales)[..., None]
    step = 1 / 127 if dtype == "int8" else 1 / 16
    assert (np.abs(found - parts) <= step * largest[..., None]).all()


@pytest.mark.one_backend
@pytest.mark.parametrize("block", [0, 5, 2.0, -4])
def test_blocks_that_do_not_fit(block: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"block = {block!r}")) as caught:
        rms_norm_quantized(jnp.ones((2, 8)), block=block)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_derivatives_take_the_results_as_constants() -> None:
    x = jnp.ones((2, 3))
    assert (jax.grad(lambda x: rms_norm_quantized(x)[1].sum() + x.sum())(x) == 1).all()


@pytest.mark.one_backend
@every_dtype
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e"])
@pytest.mark.slow
def test_compiles_without_spills(target: str, dtype: str, block: int | None) -> None:
    pytest.importorskip("triton" if target.startswith("cuda") else "libtpu", reason=f"compiles for {target}")
    x, weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    keywords = {"out_dtype": dtype, "eps": 1e-6, "offset": 0.0, "block": block}
    traced = rms_norm_quantized_forward.trace(x, weight, **keywords, target=target)
    compiled = traced.lower(target).compile()
    assert target.startswith("tpu") or compiled.resources.spills == 0


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "weight", "dtype", "got"),
    [
        (jnp.zeros((2, 3), jnp.int32), None, "int8", "x = int32[2, 3]"),
        (jnp.zeros((2, 3)), jnp.zeros(2), "int8", "weight = float32[2]"),
        (jnp.zeros((2, 0)), None, "int8", "x = float32[2, 0]"),
        (jnp.zeros((2, 3)), None, "int4", "out_dtype = 'int4'"),
    ],
)
def test_arguments_that_do_not_fit(x: Any, weight: Any, dtype: str, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        rms_norm_quantized(x, weight, out_dtype=dtype)  # here
    assert "# here" in caught.value.loc.snippet()
