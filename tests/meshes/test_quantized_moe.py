"""Mixtures of experts whose matrices, and rows, have 8 bits: against the same numbers in wide dtypes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.meshes.test_moe import CHOSEN, EXPERTS, HIDDEN, mesh_of, naive, operands
from tilekern.distributed import moe
from tilekern.errors import ArgumentError
from tilekern.kernels.quantization import dequantize, quantize
from tilekern.testing import assert_close, in_float64


def quantized(dtype: str = "int8") -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Tokens and logits, matrices of 8 bits, and their scales by column."""
    x, logits, *matrices = operands()
    values, scales = zip(*(quantize(w, (None, 1), dtype=dtype) for w in matrices), strict=True)
    return [x, logits], list(values), list(scales)


@pytest.mark.parametrize("devices", [1, 4])
def test_matrices_of_8_bits(devices: int) -> None:
    given, values, scales = quantized()

    def ours(x: Any, logits: Any, values: Any, scales: Any) -> Any:
        axis = None if devices == 1 else "expert"
        return moe(x, logits, *values, scales=scales, experts_per_token=CHOSEN, axis_name=axis)

    def theirs(x: Any, logits: Any, *scales: Any) -> Any:
        matrices = (dequantize(w, scale, x.dtype) for w, scale in zip(values, scales, strict=True))
        return naive(x, logits, *matrices)

    call = (
        ours
        if devices == 1
        else jax.shard_map(ours, mesh=mesh_of(devices), in_specs=P("expert"), out_specs=P("expert"))
    )
    out = jax.jit(call)(*given, values, scales)
    assert_close(out, in_float64(theirs, *given, *scales), jax.jit(theirs)(*given, *scales), length=4 * HIDDEN * CHOSEN)
    slope = jax.jit(jax.grad(lambda x: call(x, given[1], values, scales).sum()))(given[0])
    expected = jax.jit(jax.grad(lambda x, *rest: theirs(x, *rest).sum()))
    low, high = expected(*given, *scales), in_float64(expected, *given, *scales)
    assert_close(slope, high, low, length=4 * HIDDEN * CHOSEN, factor=3)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_each_dtype_of_rows_is_taken(dtype: str) -> None:
    given, values, scales = quantized(dtype)
    options: Any = {"experts_per_token": 1, "scales": scales, "quantize_rows": dtype}
    assert jax.eval_shape(partial(moe, **options), *given, *values).shape == given[0].shape


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_of_8_bits_too(dtype: str) -> None:
    """The steps of a layer one by one: rows are rounded, and multiplied as they are."""
    (x, logits), values, scales = quantized(dtype)
    options: Any = {"experts_per_token": 1, "normalize": True, "quantize_rows": dtype}
    out = moe(x, logits, *values, scales=scales, **options)
    expert = jnp.argmax(logits, axis=1)

    @partial(jax.jit, static_argnums=1)
    def product(rows: Any, n: int) -> Any:
        rounded = dequantize(*quantize(rows, (1, None), dtype=dtype))
        return jnp.einsum("tk,tkn->tn", rounded, dequantize(values[n], scales[n])[expert], precision="highest")

    expected = product(jax.nn.silu(product(x, 0)) * product(x, 1), 2)
    # A product that is rounded another way may round a row of the second layer to its neighbour.
    step = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16}[dtype]
    assert (jnp.abs(out - expected) <= step * jnp.abs(expected).max()).all()


@pytest.mark.parametrize(
    ("keywords", "got"),
    [
        ({"scales": 1.0}, "scales = 1.0"),
        ({"scales": (None, None)}, "scales = "),
        ({"quantize_rows": "int4"}, "quantize_rows = 'int4'"),
        ({"scales": (None, None, jnp.ones((EXPERTS, 2, 1)))}, "rhs_scale = float32[8, 2, 1]"),
    ],
)
def test_scales_that_do_not_fit(keywords: Any, got: str) -> None:
    given, values, _ = quantized()
    with pytest.raises(ArgumentError, match=re.escape(got)):
        moe(*given, *values, experts_per_token=CHOSEN, **keywords)
