"""Products of arrays of 8 and 4 bits with scales: values, derivatives, transformations and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import ArgumentError, NotDifferentiableError
from tilekern.kernel.instance import Instance
from tilekern.kernels import QuantizedArray, quantized_matmul
from tilekern.kernels.matmul import quantized_reference
from tilekern.kernels.matmul.quantized_cases import QUANTIZED_CASES, QuantizedCase
from tilekern.lower.lowering import lower
from tilekern.lower.target import Target, resolve
from tilekern.testing import assert_close, in_float64

BLOCKS = ({}, {"block_m": 5, "block_n": 24, "block_k": 16})


def shifted(product: Any, bias: Any) -> Any:
    return jax.nn.silu(product + bias)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def quantized(*shape: int, **keywords: Any) -> QuantizedArray:
    return QuantizedArray.quantize(normal(*shape), **keywords)


def check(lhs: Any, rhs: Any, *operands: Any, **keywords: Any) -> None:
    """Equal to the product of dequantised matrices, by the rule."""
    launch = {name: value for name, value in keywords.items() if name.startswith("block") or name == "target"}
    of = {name: value for name, value in keywords.items() if name not in launch}
    out = quantized_matmul(lhs, rhs, *operands, out_dtype="float32", **keywords)
    leaves, tree = jax.tree.flatten((lhs, rhs, operands))

    def reference(*leaves: Any, dtype: Any) -> Any:
        left, right, others = jax.tree.unflatten(tree, leaves)
        return quantized_reference(left, right, *others, **of, dtype=dtype)

    with jax.enable_x64(True):
        exact = np.asarray(reference(*leaves, dtype=jnp.float64))
    assert_close(out, exact, reference(*leaves, dtype=jnp.float32), length=lhs.shape[-1])


@pytest.mark.parametrize("target", ["cpu:xla", "cpu"])
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=lambda case: case.name)
def test_products_of_real_layers(case: QuantizedCase, target: str) -> None:
    check(*case.small().arrays(jax.random.key(0), jnp.float32), target=target)


@pytest.mark.parametrize("blocks", BLOCKS, ids=["own", "small"])
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=lambda case: case.name)
def test_epilogues(case: QuantizedCase, blocks: dict[str, int]) -> None:
    x, w = case.small().arrays(jax.random.key(0), jnp.float32)
    check(x, w, normal(w.shape[1]), epilogue=shifted, **blocks)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("block", [(None, None), (None, 1), (1, None), (16, 1), (16, 8)])
def test_scales_of_tensors_rows_columns_and_blocks(dtype: str, block: Any) -> None:
    check(normal(7, 64), quantized(64, 24, dtype=dtype, block=block))


@pytest.mark.parametrize("zero_points", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("block", [None, (1, 16)])
def test_zero_points(zero_points: tuple[bool, bool], block: Any) -> None:
    left, right = zero_points
    lhs = quantized(5, 64, axis=None if block else -1, block=block, zero_point=left)
    check(lhs, quantized(64, 12, block=(16, 1) if block else (None, 1), zero_point=right))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_transposed_weights(dtype: str) -> None:
    check(normal(5, 64), quantized(24, 64, dtype=dtype, block=(8, 16)), transpose_rhs=True)


def test_int4_with_an_odd_inner_dim() -> None:
    check(normal(3, 33), quantized(33, 7, dtype="int4", axis=0))
    check(normal(3, 33), quantized(7, 33, dtype="int4", axis=1), transpose_rhs=True)


def test_sums_of_integers_are_exact() -> None:
    lhs, rhs = (
        QuantizedArray(jnp.full(s, n, jnp.int8), jnp.ones((1, 1))) for s, n in (((3, 4096), 127), ((4096, 5), -127))
    )
    np.testing.assert_array_equal(quantized_matmul(lhs, rhs, out_dtype="float32"), np.float32(-127 * 127 * 4096))


@pytest.mark.parametrize(
    "shapes", [((2, 3, 32), (32, 9)), ((2, 3, 32), (2, 32, 9)), ((4, 1, 3, 32), (2, 32, 9)), ((3, 32), (2, 32, 9))]
)
def test_leading_dims(shapes: Any) -> None:
    left, right = shapes
    check(normal(*left), QuantizedArray.quantize(normal(*right), axis=-2))


@pytest.mark.parametrize("shape", [(0, 32, 5), (4, 32, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    out = quantized_matmul(normal(m, k), QuantizedArray(jnp.zeros((k, n), jnp.int8), jnp.ones((1, n))))
    assert out.shape == (m, n)


def test_activations_are_quantised_as_they_come() -> None:
    x, w = normal(6, 64), quantized(64, 9, axis=0)
    ours = quantized_matmul(x, w, lhs_dtype="int8")
    np.testing.assert_array_equal(ours, quantized_matmul(QuantizedArray.quantize(x, axis=-1), w, out_dtype="float32"))
    check(x, w, lhs_dtype="float8_e4m3fn", lhs_block=(1, 16))


# --- derivatives and transformations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("epilogue", [None, shifted])
def test_gradients_of_floats_and_scales(epilogue: Any) -> None:
    """Weight-only: by activations, by scales, and by the operands of the epilogue."""
    x, w = normal(6, 64), quantized(64, 24, block=(16, 8))
    bias = (normal(24),) if epilogue else ()

    def loss(product: Any, x: Any, scales: Any, *bias: Any) -> Any:
        return jnp.sin(product(x, QuantizedArray(w.values, scales), *bias, epilogue=epilogue)).sum()

    arrays = (x, w.scales, *bias)
    numbers = tuple(range(len(arrays)))
    ours = jax.grad(partial(loss, quantized_matmul), numbers)(*arrays)
    reference = jax.grad(partial(loss, quantized_reference), numbers)
    exact = in_float64(jax.grad(partial(loss, partial(quantized_reference, dtype="float64")), numbers), *arrays)
    for found, oracle, low in zip(ours, exact, reference(*arrays), strict=True):
        assert_close(found, oracle, low, length=64 * 24, factor=3)


def test_gradients_go_straight_through_roundings() -> None:
    """As if the rounded numbers were the numbers themselves."""
    x, w = normal(6, 64), normal(64, 24)
    left, right = (QuantizedArray.quantize(a, axis=n).dequantize() for a, n in ((x, -1), (w, 0)))
    ours = jax.grad(lambda x, w: jnp.sin(quantized_matmul(x, w, lhs_dtype="int8", rhs_dtype="int8")).sum(), (0, 1))(
        x, w
    )
    loss = jax.grad(lambda x, w: jnp.sin(x @ w).sum(), (0, 1))
    for found, exact, low in zip(ours, in_float64(loss, left, right), loss(left, right), strict=True):
        assert_close(found, exact, low, length=64 * 24, factor=3)


def test_second_derivatives() -> None:
    x, w = normal(3, 32), quantized(32, 5, axis=0)
    ours = jax.hessian(lambda x: jnp.sin(quantized_matmul(x, w)).sum())(x)
    theirs = jax.hessian(lambda x: jnp.sin(quantized_reference(x, w)).sum())
    exact = in_float64(jax.hessian(lambda x: jnp.sin(quantized_reference(x, w, dtype="float64")).sum()), x)
    assert_close(ours, exact, theirs(x), length=32 * 5, factor=3)


def test_vmap_and_jit() -> None:
    x, w = normal(4, 3, 32), jax.vmap(lambda w: QuantizedArray.quantize(w, axis=0))(normal(4, 32, 5))
    ours = jax.jit(jax.vmap(quantized_matmul))(x, w)
    for n in range(4):
        one = jax.tree.map(lambda a, n=n: a[n], w)
        np.testing.assert_array_equal(ours[n], quantized_matmul(x[n], one))


def test_values_have_no_derivative() -> None:
    w = QuantizedArray.quantize(normal(16, 4), "float8_e4m3fn", axis=0)

    def product(values: Any) -> Any:
        return quantized_matmul(normal(2, 16), QuantizedArray(values, w.scales)).sum()

    with pytest.raises(NotDifferentiableError, match="rhs of float8_e4m3fn has no derivative"):
        jax.grad(product)(w.values)


@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v6e"])
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=lambda case: case.name)
def test_gpus_and_tpus_take_products_of_real_layers(case: QuantizedCase, target: str) -> None:
    """With the sizes of the model, whose blocks are the schedule's."""
    kind = resolve(target)
    calls = list(_kernels(jax.make_jaxpr(quantized_matmul)(*jax.eval_shape(_arrays(case), jax.random.key(0))), kind))
    assert any("quantized_matmul_forward" in kernel.name for kernel in calls)
    for kernel in calls:
        lower(kernel.version(kind).func, kind, kernel.launch(kind))


def _arrays(case: QuantizedCase) -> Any:
    return lambda key: case.arrays(key, jnp.bfloat16)


def _kernels(jaxpr: Any, target: Target) -> Iterator[Instance]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "tilekern_call":
            called = equation.params["callee"].kernels(target, [v.aval for v in equation.invars])
            yield from (kernel for kernel, _ in called)
        elif "jaxpr" in equation.params:
            yield from _kernels(equation.params["jaxpr"], target)


# --- refused ----------------------------------------------------------------------------------------------------------


X, W = normal(4, 32), quantized(32, 6, axis=0)
WRONG: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
    ((X, normal(32, 6)), {}, "no operand of quantized_matmul is quantised"),
    ((normal(4, 31), W), {}, "the matrices of quantized_matmul do not fit"),
    ((X, W), {"rhs_dtype": "int8"}, "rhs of quantized_matmul is quantised already"),
    ((jnp.ones((4, 32), jnp.int32), W), {}, "quantized_matmul cannot take this lhs"),
    ((X, W, normal(5)), {"epilogue": shifted}, "operand 0 of quantized_matmul does not broadcast to the product"),
    (
        (X, QuantizedArray(W.values, X[:1, :5])),
        {},
        "the scales of rhs of quantized_matmul do not fit its values",
    ),
    (
        (quantized(4, 96, block=(1, 32)), quantized(96, 6, block=(48, 1))),
        {},
        "the blocks of the scales of quantized_matmul do not nest along the inner dim",
    ),
)


@pytest.mark.parametrize(("arrays", "keywords", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_arguments_that_do_not_fit(arrays: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    with refused(ArgumentError, message):
        quantized_matmul(*arrays, **keywords)  # <-


def test_a_wrong_block_of_the_launch() -> None:
    with pytest.raises(tk.errors.ArgumentError):
        quantized_matmul(normal(4, 32), quantized(32, 6, axis=0), block_q=3)  # pyright: ignore[reportCallIssue] -- wrong on purpose
