"""Products of quantised arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tests.lower.library import kernels_of
from tilekern import nn
from tilekern.errors import ArgumentError, NotDifferentiableError
from tilekern.kernels import QuantizedArray, quantized_matmul
from tilekern.kernels.matmul import quantized_reference
from tilekern.kernels.matmul.quantized_cases import QUANTIZED_CASES, QuantizedCase
from tilekern.kernels.matmul.quantized_kernel import fused_quantized_matmul_forward, quantized_matmul_forward
from tilekern.lower.lowering import lower
from tilekern.lower.target import resolve
from tilekern.testing import assert_close, in_float64

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((19, 96)).astype(np.float32)
W = RANDOM.standard_normal((96, 48)).astype(np.float32)
BIAS = RANDOM.standard_normal(48).astype(np.float32)

WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"axis": 0},
    "int8_tensor": {},
    "int8_zeros": {"axis": 0, "zero_point": True},
    "int4": {"dtype": "int4", "block": (32, 1)},
    "int4_zeros": {"dtype": "int4", "block": (16, 1), "zero_point": True},
    "float8": {"dtype": "float8_e4m3fn", "axis": 0},
    "float8_blocks": {"dtype": "float8_e5m2", "block": (16, 16)},
    "mxfp4": {"dtype": "float4_e2m1fn", "block": (32, 1), "scale_dtype": "float8_e8m0fnu"},
    "nvfp4": {"dtype": "float4_e2m1fn", "block": (16, 1), "scale_dtype": "float8_e4m3fn"},
}
ROWS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"lhs_dtype": "int8"},
    "float8_blocks": {"lhs_dtype": "float8_e4m3fn", "lhs_block": (1, 16)},
}


def gated(product: Any, bias: Any) -> Any:
    return jax.nn.silu(product + bias)


def check(lhs: Any, rhs: Any, *operands: Any, **keywords: Any) -> None:
    out = quantized_matmul(lhs, rhs, *operands, **keywords)
    same = {name: value for name, value in keywords.items() if name in ("epilogue", "transpose_rhs")}
    dtype = lhs.dtype if lhs.dtype in (jnp.float32, jnp.bfloat16) else "float32"
    low = jax.jit(partial(quantized_reference, dtype=dtype, **same))(lhs, rhs, *operands).astype(out.dtype)
    wide = partial(quantized_reference, dtype="float64", **same)
    leaves, tree = jax.tree.flatten((lhs, rhs, *operands))
    oracle = in_float64(lambda *leaves: wide(*jax.tree.unflatten(tree, leaves)), *leaves)
    assert_close(out, oracle, low, length=rhs.shape[-2], factor=3)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_scales(weights: str, rows: str) -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), **WEIGHTS[weights])
    keywords = ROWS[rows]
    lhs: Any = jnp.asarray(X)
    if keywords:
        lhs = QuantizedArray.quantize(lhs, keywords["lhs_dtype"], block=keywords.get("lhs_block", (1, None)))
        np.testing.assert_array_equal(
            quantized_matmul(jnp.asarray(X), rhs, out_dtype="float32", **keywords),
            quantized_matmul(lhs, rhs, out_dtype="float32"),
        )
    check(lhs, rhs, out_dtype="float32")


@pytest.mark.parametrize("case", [case.small() for case in QUANTIZED_CASES], ids=lambda case: case.name)
def test_small_quantized_cases(case: QuantizedCase) -> None:
    check(*case.arrays(jax.random.key(0), jnp.bfloat16))


@pytest.mark.one_backend
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=lambda case: case.name)
def test_quantized_cases_trace(case: QuantizedCase) -> None:
    arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    out = jax.eval_shape(quantized_matmul, *arrays)
    assert (out.shape, out.dtype) == ((case.rows, case.columns), jnp.bfloat16)


@pytest.mark.parametrize("weights", ["int8", "int4_zeros", "float8_blocks"])
def test_epilogues_and_transposed_weights(weights: str) -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), **WEIGHTS[weights])
    turned = jax.tree.map(lambda a: a.mT, rhs)
    check(jnp.asarray(X), turned, BIAS, epilogue=gated, transpose_rhs=True, block_n=16)


def test_products_of_integers_are_exact() -> None:
    """Sums in float32 would round: 127² · 4096 has 26 bits."""
    lhs, rhs = jnp.full((2, 4096), 127, jnp.int8).at[0, 0].set(126), jnp.full((4096, 3), 127, jnp.int8)
    one = jnp.ones((1, 1))
    out = quantized_matmul(QuantizedArray(lhs, one / 512), QuantizedArray(rhs, one), out_dtype="float32")
    exact = (np.asarray(lhs, np.int64) @ np.asarray(rhs, np.int64)).astype(np.float32) / 512
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(5, 33, 7), (4, 31, 9)])
def test_numbers_of_4_bits_of_odd_sizes(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inner, columns = shape
    rhs = QuantizedArray.quantize(jnp.asarray(W[:inner, :columns]), "int4", axis=0)
    rhs = jax.tree.map(lambda a: a.mT, rhs) if transposed else rhs
    check(jnp.asarray(X[:rows, :inner]), rhs, transpose_rhs=transposed)


def test_leading_dims() -> None:
    x = jnp.asarray(X[:18]).reshape(2, 9, 96)
    one, two = (QuantizedArray.quantize(jnp.stack([W, 2 * W][:n]), block=(16, 1)) for n in (1, 2))
    rows = QuantizedArray.quantize(x, axis=-1)
    whole = QuantizedArray.quantize(x)
    for lhs in (x, rows, whole):
        for rhs in (one, two, jax.tree.map(lambda a: a[0], one)):
            check(lhs, rhs, BIAS, epilogue=gated, out_dtype="float32")


def test_under_vmap_and_jit() -> None:
    rhs = QuantizedArray.quantize(jnp.stack([W, -W]), block=(None, 1))
    out = jax.jit(jax.vmap(partial(quantized_matmul, lhs_dtype="int8"), (None, 0)))(X, rhs)
    np.testing.assert_array_equal(out[0], -out[1])
    first = jax.tree.map(lambda a: a[0], rhs)
    np.testing.assert_array_equal(out[0], quantized_matmul(X, first, lhs_dtype="int8"))


@pytest.mark.one_backend
def test_meanings_of_scaled_matmul() -> None:
    lhs = QuantizedArray.quantize(jnp.asarray(X)[None], "float8_e4m3fn", block=(1, 16))
    rhs = QuantizedArray.quantize(jnp.asarray(W.T)[None], "float8_e4m3fn", block=(1, 16))
    theirs = nn.scaled_matmul(lhs.values, rhs.values, lhs.scales, rhs.scales)
    np.testing.assert_allclose(
        quantized_matmul(lhs, rhs, transpose_rhs=True, out_dtype="float32"), theirs, rtol=1e-5, atol=1e-5
    )


@pytest.mark.one_backend
def test_devices_divide_rows_and_columns() -> None:
    mesh = jax.make_mesh((2, 2), ("rows", "columns"))
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))  # noqa: E731
    rhs = QuantizedArray.quantize(jnp.asarray(W), block=(16, 1))
    divided = QuantizedArray(put(rhs.values, None, "columns"), put(rhs.scales, None, "columns"))
    call = jax.jit(quantized_matmul)
    x = put(jnp.asarray(X[:18]), "rows")
    out = call(x, divided)
    assert out.sharding.spec == jax.sharding.PartitionSpec("rows", "columns")
    np.testing.assert_allclose(out, quantized_matmul(X[:18], rhs), rtol=1e-5, atol=1e-5)
    assert "all-gather" not in call.lower(x, divided).compile().as_text()


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4_zeros", "float8_blocks", "mxfp4"])
@pytest.mark.parametrize("epilogue", [None, gated])
def test_gradients_of_rows_and_scales(weights: str, transposed: bool, epilogue: Any) -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), **{**WEIGHTS[weights], "scale_dtype": "float32"})
    rhs = jax.tree.map(lambda a: a.mT, rhs) if transposed else rhs
    cotangent = RANDOM.standard_normal((19, 48)).astype(np.float32)
    operands = () if epilogue is None else (jnp.asarray(BIAS),)

    def loss(function: Any, x: Any, scales: Any, *operands: Any) -> Any:
        weight = QuantizedArray(rhs.values, scales, rhs.zero_points)
        return (function(x, weight, *operands, epilogue=epilogue, transpose_rhs=transposed) * cotangent).sum()

    def slopes(function: Any, *arrays: Any) -> Any:
        return jax.grad(partial(loss, function), tuple(range(len(arrays))))(*arrays)

    arrays = X, rhs.scales, *operands
    oracle = in_float64(partial(slopes, partial(quantized_reference, dtype="float64")), *arrays)
    low = jax.jit(partial(slopes, quantized_reference))(*arrays)
    for found, exact, naive in zip(slopes(quantized_matmul, *arrays), oracle, low, strict=True):
        assert_close(found, exact, naive, length=19 * 96, factor=3)


@pytest.mark.parametrize("epilogue", [None, gated])
def test_gradients_go_straight_through_roundings(epilogue: Any) -> None:
    """Both operands are rounded; the gradients are those of a product of the rounded numbers."""
    operands = () if epilogue is None else (BIAS,)
    keywords: dict[str, Any] = {"lhs_dtype": "int8", "rhs_dtype": "int4", "rhs_block": (32, 1)}
    left = QuantizedArray.quantize(jnp.asarray(X), "int8", axis=1).dequantize()
    right = QuantizedArray.quantize(jnp.asarray(W), "int4", block=(32, 1)).dequantize()

    def ours(x: Any, w: Any) -> Any:
        return (quantized_matmul(x, w, *operands, epilogue=epilogue, **keywords) ** 2).sum()

    def theirs(x: Any, w: Any) -> Any:
        return (quantized_reference(x, w, *operands, epilogue=epilogue, dtype=x.dtype) ** 2).sum()

    oracle = in_float64(jax.grad(theirs, (0, 1)), left, right)
    low = jax.jit(jax.grad(theirs, (0, 1)))(left, right)
    for found, exact, naive in zip(jax.grad(ours, (0, 1))(X, W), oracle, low, strict=True):
        assert_close(found, exact, naive, length=96 * 96, factor=3)


def test_gradients_through_quantised_activations_with_a_quantised_weight() -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), axis=0)
    found = jax.grad(lambda x: quantized_matmul(x, rhs, lhs_dtype="int8").sum())(X)
    np.testing.assert_allclose(found, np.broadcast_to(rhs.dequantize().sum(1), X.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.one_backend
def test_values_have_no_derivative() -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), "float8_e4m3fn")
    with pytest.raises(NotDifferentiableError, match="rhs of float8_e4m3fn has no derivative"):
        jax.grad(lambda v: quantized_matmul(X, QuantizedArray(v, rhs.scales)).sum())(rhs.values)


# --- interpreted, refused ---------------------------------------------------------------------------------------------


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    rhs = QuantizedArray.quantize(jnp.asarray(W), "int8", block=(16, 1))
    lhs = QuantizedArray.quantize(jnp.asarray(X), "int8", axis=1)
    arrays = lhs.values, rhs.values[None], lhs.scales, rhs.scales[None]
    static: dict[str, Any] = {
        "transpose_rhs": False,
        "out_dtype": "float32",
        "block_m": 8,
        "block_n": 16,
        "block_k": 32,
    }
    expected = quantized_reference(lhs, rhs)
    plain = quantized_matmul_forward.trace(*arrays, **static)
    np.testing.assert_allclose(tk.interpret(plain)(*arrays), expected, rtol=1e-4, atol=1e-4)
    fused = fused_quantized_matmul_forward.trace(*arrays, (BIAS[None],), epilogue=gated, **static)
    np.testing.assert_allclose(tk.interpret(fused)(*arrays, (BIAS[None],)), gated(expected, BIAS), rtol=1e-4, atol=1e-4)


@pytest.mark.one_backend
def test_no_terms_and_no_rows() -> None:
    rhs = QuantizedArray(jnp.zeros((0, 48), jnp.int8), jnp.ones((1, 48)))
    np.testing.assert_allclose(quantized_matmul(X[:, :0], rhs, BIAS, epilogue=gated)[3], gated(0, BIAS), rtol=1e-6)
    assert quantized_matmul(X[:0], QuantizedArray.quantize(jnp.asarray(W))).shape == (0, 48)


Q = QuantizedArray(jnp.zeros((96, 48), jnp.int8), jnp.ones((1, 48)))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((X, W), {}, "no operand of quantized_matmul is quantised"),
        ((X[:, :5], Q), {}, "the matrices of quantized_matmul do not fit"),
        ((X, Q), {"transpose_rhs": True}, "the matrices of quantized_matmul do not fit"),
        ((X, QuantizedArray(Q.values, jnp.ones((5, 48)))), {}, "the scales of rhs of quantized_matmul do not fit"),
        ((X, QuantizedArray(Q.values, jnp.ones(48))), {}, "the scales of rhs of quantized_matmul do not fit"),
        ((X.astype(np.int32), Q), {}, "quantized_matmul cannot take this lhs"),
        ((X, Q), {"rhs_dtype": "int8"}, "rhs of quantized_matmul is quantised already"),
        ((X, Q), {"lhs_dtype": "int16"}, "quantized_matmul has no values of this dtype"),
        ((X, Q, jnp.ones(5)), {"epilogue": gated}, "operand 0 of quantized_matmul does not broadcast"),
        ((X, Q, BIAS), {}, "the epilogue of quantized_matmul does not return a number"),
        ((X, Q), {"out_dtype": "int8"}, "quantized_matmul has no results of this dtype"),
        ((X, Q), {"block_x": 8}, "quantized_matmul has no keyword argument 'block_x'"),
        (
            (
                QuantizedArray(jnp.zeros((2, 96), jnp.int8), jnp.ones((2, 2))),
                QuantizedArray(Q.values, jnp.ones((3, 1))),
            ),
            {},
            "the blocks of the scales of quantized_matmul do not nest",
        ),
    ],
)
def test_refused(arguments: Any, keywords: Any, summary: str) -> None:
    with refused(ArgumentError, summary):
        quantized_matmul(*arguments, **keywords)  # <-


@pytest.mark.one_backend
def test_second_derivatives() -> None:
    x, w = jnp.asarray(X[:3, :32]), QuantizedArray.quantize(jnp.asarray(W[:32, :5]), axis=0)

    def loss(product: Any, x: Any) -> Any:
        return jnp.sin(product(x, w)).sum()

    ours = jax.hessian(partial(loss, quantized_matmul))(x)
    exact = in_float64(jax.hessian(partial(loss, partial(quantized_reference, dtype="float64"))), x)
    assert_close(ours, exact, jax.hessian(partial(loss, quantized_reference))(x), length=32 * 5, factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v6e"])
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=lambda case: case.name)
def test_gpus_and_tpus_take_products_of_real_layers(case: QuantizedCase, target: str) -> None:
    """With the sizes of the model, whose blocks are the schedule's."""
    kind = resolve(target)
    arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    calls = list(kernels_of(jax.make_jaxpr(quantized_matmul)(*arrays), kind))
    assert any("quantized_matmul_forward" in kernel.name for kernel in calls)
    for kernel in calls:
        lower(kernel.version(kind).func, kind, kernel.launch(kind))
