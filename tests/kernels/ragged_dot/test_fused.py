import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ragged_dot.test_kernel import BLOCKS, group_sizes
from tilekern.errors import ArgumentError
from tilekern.kernels.ragged_dot import fused_ragged_dot, fused_reference, ragged_dot
from tilekern.kernels.ragged_dot.fused import fused_ragged_dot_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths


def gated(gate: Any, up: Any, bias: Any, other: Any) -> Any:
    return jax.nn.silu(gate + bias) * (up + other)


def shifted(product: Any, bias: Any, residual: Any) -> Any:
    return product + bias + residual


def scaled(product: Any, rows: Any, groups: Any, one: Any) -> Any:
    return product * rows * groups * one


def unchanged(product: Any) -> Any:
    return product


# Epilogues, how many matrices they take, and the shapes of their operands for M rows, N columns and G groups.
EPILOGUES = {
    "gated": (gated, 2, lambda m, n, g: ((g, 1, n), (g, 1, n))),
    "shifted": (shifted, 1, lambda m, n, g: ((g, 1, n), (m, n))),
    "scaled": (scaled, 1, lambda m, n, g: ((m, 1), (g, 1, 1), ())),
    "unchanged": (unchanged, 1, lambda m, n, g: ()),
}


def check(lhs: Any, sizes: Any, rhs: Any, *operands: Any, epilogue: Any, **blocks: int) -> None:
    """A call with several matrices, `rhs`, or one, and operands, against the definition in float64."""

    def call(function: Any, *arrays: Any, **keywords: Any) -> Any:
        lhs, sizes, *rest = arrays
        return function(lhs, rest[: len(rhs)], sizes, *rest[len(rhs) :], epilogue=epilogue, **keywords)

    given = (lhs, sizes, *rhs, *operands)
    with jax.enable_x64(lhs.dtype == np.float64):
        out = call(fused_ragged_dot, *given, **blocks)
        low = call(fused_reference, *given, dtype=lhs.dtype)
    oracle = in_float64(partial(call, fused_reference), *given)
    assert_close(out, oracle, low, length=4 * max(1, lhs.shape[1]))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", EPILOGUES)
@settings(max_examples=4)
@given(data=st.data(), m=lengths(8), n=lengths(16), k=st.sampled_from([0, 1, 16, 21]))
def test_floats(name: str, dtype: str, data: st.DataObject, m: int, n: int, k: int) -> None:
    epilogue, count, shapes = EPILOGUES[name]
    groups = data.draw(st.sampled_from([1, 4]))

    def draw(*shape: int) -> Any:
        return data.draw(arrays(jnp.dtype(dtype), shape))

    rhs = [draw(groups, k, n) for _ in range(count)]
    operands = [draw(*shape) for shape in shapes(m, n, groups)]
    sizes = data.draw(group_sizes(groups, m))
    check(draw(m, k), sizes, rhs, *operands, epilogue=epilogue, **data.draw(st.sampled_from(BLOCKS)))


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


SIZES = np.array([5, 0, 7, 3], np.int32)


def problem(rows: int = 20) -> tuple[Any, ...]:
    """Rows, two matrices and two biases of four groups, one of them empty; rows that no group has."""
    return normal(rows, 12), normal(4, 12, 9), normal(4, 12, 9) + 1, normal(4, 1, 9), normal(4, 1, 9) - 1


def call(function: Any, lhs: Any, gate: Any, up: Any, *operands: Any, **keywords: Any) -> Any:
    return function(lhs, (gate, up), SIZES, *operands, epilogue=gated, **keywords)


def test_rows_of_no_group_are_0() -> None:
    out = call(fused_ragged_dot, *problem())
    assert (out[15:] == 0).all()
    assert (out[:15] != 0).all()


def test_transposed_matrices() -> None:
    lhs, gate, up, *operands = problem()
    turned = call(fused_ragged_dot, lhs, gate.mT, up.mT, *operands, transpose_rhs=True)
    low = call(fused_reference, lhs, gate, up, *operands, dtype=lhs.dtype)
    oracle = in_float64(partial(call, fused_reference), lhs, gate, up, *operands)
    assert_close(turned, oracle, low, length=lhs.shape[1])


def test_without_an_epilogue_it_is_ragged_dot() -> None:
    lhs, rhs = normal(20, 33, dtype=jnp.bfloat16), normal(4, 33, 21, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(fused_ragged_dot(lhs, rhs, SIZES, epilogue=unchanged), ragged_dot(lhs, rhs, SIZES))


@pytest.mark.parametrize(("m", "k", "n", "groups"), [(0, 5, 3, 2), (4, 0, 3, 2), (4, 5, 0, 2), (4, 5, 3, 0)])
def test_empty(m: int, k: int, n: int, groups: int) -> None:
    sizes = np.full(groups, 1, np.int32)
    check(normal(m, k), sizes, [normal(groups, k, n)], normal(groups, 1, n), normal(m, n), epilogue=shifted)


def test_gradients() -> None:
    """Of rows, matrices and biases; an empty group's are 0."""
    cotangent = normal(20, 9)

    def pulled(function: Any) -> Any:
        def loss(*arrays: Any, **keywords: Any) -> Any:
            return (call(function, *arrays, **keywords) * cotangent).sum()

        return jax.grad(loss, argnums=range(5))

    found = pulled(fused_ragged_dot)(*problem())
    lows, highs = pulled(fused_reference)(*problem()), in_float64(pulled(fused_reference), *problem())
    for ours, low, high in zip(found, lows, highs, strict=True):
        assert_close(ours, high, low, length=60)
    assert all((of_group[1] == 0).all() for of_group in found[1:])


@pytest.mark.one_backend
@pytest.mark.slow
def test_second_derivatives() -> None:
    given = problem()

    def twice(function: Any) -> Any:
        def slope(gate: Any) -> Any:
            lhs, _, *rest = given
            return jax.grad(lambda lhs: (call(function, lhs, gate, *rest) ** 2).sum())(lhs).sum()

        return lambda gate: jax.grad(slope)(gate)

    found, low = twice(fused_ragged_dot)(given[1]), twice(fused_reference)(given[1])
    assert_close(found, in_float64(twice(fused_reference), given[1]), low, length=200, factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize(("epilogue", "saved"), [(unchanged, False), (lambda product: product * product, True)])
def test_the_product_is_saved_if_the_backward_pass_reads_it(epilogue: Any, saved: bool) -> None:
    _, pull = jax.vjp(lambda *arrays: fused_ragged_dot(*arrays, SIZES, epilogue=epilogue), *problem()[:2])
    assert saved == any(kept.shape == (20, 9) for kept in jax.tree.leaves(pull))


def test_under_vmap() -> None:
    lhs, rhs, bias = normal(3, 20, 6), normal(4, 6, 5), normal(3, 4, 1, 5)

    def one(lhs: Any, bias: Any, function: Any) -> Any:
        return function(lhs, rhs, SIZES, bias, epilogue=lambda product, bias: product * bias)

    found = jax.vmap(lambda *a: one(*a, fused_ragged_dot))(lhs, bias)
    np.testing.assert_allclose(found, jax.vmap(lambda *a: one(*a, fused_reference))(lhs, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.one_backend
@pytest.mark.parametrize(("target", "rows"), [("cuda:sm_80", 64), ("cuda:sm_90", 4096), ("tpu:v5e", 64)])
def test_compiles_without_spills(target: str, rows: int) -> None:
    """The first layer of Mixtral's experts, in training."""
    pytest.importorskip("triton" if target.startswith("cuda") else "libtpu", reason=f"compiles for {target}")

    def like(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    lhs, matrix, bias = like(rows, 4096), like(8, 4096, 14336), like(8, 1, 14336)
    given = lhs, (matrix, matrix), like(8, dtype=jnp.int32), None, (None, None), (bias, bias)
    settings = {"epilogue": gated, "saves": True, "transpose_rhs": False, "out_dtype": None}
    compiled = fused_ragged_dot_forward.trace(*given, **settings, target=target).lower(target).compile()
    assert target.startswith("tpu") or compiled.resources.spills == 0


LHS, RHS = jnp.zeros((20, 3)), jnp.zeros((4, 3, 5))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("given", "epilogue", "got"),
    [
        ((LHS, jnp.zeros((4, 2, 5)), SIZES), unchanged, "rhs = float32[4, 2, 5]"),
        ((LHS, (RHS, jnp.zeros((4, 3, 5), jnp.bfloat16)), SIZES), unchanged, "rhs = bfloat16[4, 3, 5]"),
        ((LHS, (RHS, jnp.zeros((4, 3, 6))), SIZES), unchanged, "float32[4, 3, 5], float32[4, 3, 6]"),
        ((LHS, (), SIZES), unchanged, "rhs = None"),
        ((LHS, RHS, SIZES.astype(np.float32)), unchanged, "group_sizes = float32[4]"),
        ((LHS, RHS, SIZES, jnp.zeros((4, 5))), unchanged, "operand 0 of fused_ragged_dot does not broadcast"),
        ((LHS, RHS, SIZES, jnp.zeros((3, 1, 5))), unchanged, "float32[3, 1, 5]"),
        ((LHS, RHS, SIZES, jnp.zeros(5, jnp.int32)), unchanged, "int32[5]"),
        ((LHS, RHS, SIZES), lambda product: product[None], "float32[1]"),
        ((LHS, RHS, SIZES), lambda product: product > 0, "bool[]"),
        ((LHS, RHS, SIZES), None, "epilogue = None"),
    ],
)
def test_arguments_that_do_not_fit(given: Any, epilogue: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        fused_ragged_dot(*given, epilogue=epilogue)  # here
    assert "# here" in caught.value.loc.snippet()
