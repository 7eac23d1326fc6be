import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilekern.errors import ArgumentError
from tilekern.kernels.matmul import fused_matmul, fused_reference, matmul
from tilekern.kernels.matmul.fused import fused_matmul_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths


def activated(product: Any, bias: Any, residual: Any) -> Any:
    return jax.nn.gelu(product + bias) + residual


def scaled(product: Any, rows: Any, one: Any) -> Any:
    return product * rows * one


def unchanged(product: Any) -> Any:
    return product


def shifted(product: Any, bias: Any) -> Any:
    return product + bias


# Epilogues, and the shapes of their operands for a product [M, N].
EPILOGUES = {
    "activated": (activated, lambda m, n: ((n,), (m, n))),
    "scaled": (scaled, lambda m, n: ((m, 1), ())),
    "unchanged": (unchanged, lambda m, n: ()),
}
BLOCKS = ({}, {"block_m": 5, "block_n": 24, "block_k": 7})


def check(x: Any, w: Any, *operands: Any, **keywords: Any) -> None:
    blocks = {name: value for name, value in keywords.items() if name.startswith("block")}
    of = {name: value for name, value in keywords.items() if name not in blocks}
    with jax.enable_x64(x.dtype == np.float64):
        out = fused_matmul(x, w, *operands, **keywords)
        low = fused_reference(x, w, *operands, **of, dtype=x.dtype)
    assert_close(out, in_float64(fused_reference, x, w, *operands, **of), low, length=w.size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", EPILOGUES)
@settings(max_examples=4)
@given(data=st.data(), m=lengths(16), n=lengths(16), k=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(name: str, dtype: str, data: st.DataObject, m: int, n: int, k: int, blocks: dict[str, int]) -> None:
    epilogue, shapes = EPILOGUES[name]
    given = [data.draw(arrays(jnp.dtype(dtype), shape)) for shape in ((m, k), (k, n), *shapes(m, n))]
    check(*given, epilogue=epilogue, **blocks)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("transpose_lhs", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_transposed_operands(transpose_lhs: bool, transpose_rhs: bool) -> None:
    x, w = normal(9, 33), normal(33, 21)
    given = (x.T if transpose_lhs else x), (w.T if transpose_rhs else w), normal(21), normal(9, 21)
    check(*given, epilogue=activated, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)


@pytest.mark.parametrize("bias", [(21,), (9, 1), (4, 1, 1), (4, 9, 21), (1, 1, 21), ()])
def test_leading_dims(bias: tuple[int, ...]) -> None:
    check(normal(4, 9, 33), normal(33, 21), normal(*bias), epilogue=shifted)


@pytest.mark.parametrize(
    ("x", "w", "operands"),
    [
        ((3, 4, 8), (3, 8, 5), ((5,), (3, 4, 5))),
        ((2, 1, 4, 8), (3, 8, 5), ((2, 1, 1, 5), (4, 1))),
        ((4, 8), (3, 8, 5), ((), (3, 1, 1))),
        ((3, 4, 8), (1, 8, 5), ((5,), (3, 4, 1))),
        ((0, 4, 8), (0, 8, 5), ((5,), (4, 1))),
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_batches(x: Any, w: Any, operands: Any, transpose: bool) -> None:
    given = (normal(*s) for s in (x, w))
    left, right = (np.swapaxes(a, -1, -2) if transpose else a for a in given)
    others = (normal(*s) for s in operands)
    check(left, right, *others, epilogue=activated, transpose_lhs=transpose, transpose_rhs=transpose)


@pytest.mark.parametrize("split_k", [None, 1, 3])
def test_split_sums(split_k: int | None) -> None:
    """Gradients, too, for which the product is an array."""
    given = normal(6, 4100), normal(4100, 5) / 64, normal(5), normal(6, 5)

    def both(function: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(jnp.cos(out))

    ours = partial(both, partial(fused_matmul, epilogue=activated, split_k=split_k))
    theirs = partial(both, partial(fused_reference, epilogue=activated))
    for found, exact, low in zip(ours(*given), in_float64(theirs, *given), theirs(*given), strict=True):
        assert_close(found, exact, low, length=4100, factor=3)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    check(normal(m, k), normal(k, n), normal(n), epilogue=shifted)


def test_vmap_takes_leading_dims_of_both() -> None:
    x, w, bias = normal(3, 4, 8), normal(3, 8, 5), normal(5)
    found = jax.vmap(lambda x, w: fused_matmul(x, w, bias, epilogue=shifted))(x, w)
    np.testing.assert_allclose(found, [fused_matmul(a, b, bias, epilogue=shifted) for a, b in zip(x, w, strict=True)])


def test_without_an_epilogue_it_is_matmul() -> None:
    x, w = normal(9, 33, dtype=jnp.bfloat16), normal(33, 21, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(fused_matmul(x, w, epilogue=unchanged), matmul(x, w))


@pytest.mark.one_backend
@pytest.mark.parametrize(("name", "saved"), [("activated", True), ("scaled", True), ("shifted", False)])
def test_the_product_is_saved_if_the_backward_pass_reads_it(name: str, saved: bool) -> None:
    epilogue, shapes = EPILOGUES.get(name, (shifted, lambda m, n: ((n,),)))
    given = [jnp.ones(shape) for shape in ((3, 4), (4, 5), *shapes(3, 5))]
    kept = jax.tree.leaves(jax.vjp(lambda *arrays: fused_matmul(*arrays, epilogue=epilogue), *given)[1])
    products = [k for k in kept if k.shape == (3, 5) and (np.asarray(k) == 4).all()]
    assert len(products) == saved
    assert sum(k.size for k in kept) <= 32 + 15 * 2 * saved + 6


@pytest.mark.one_backend
def test_second_derivatives() -> None:
    given = normal(3, 4), normal(4, 5), normal(5), normal(3, 5)

    def twice(function: Any) -> Any:
        def slope(w: Any) -> Any:
            x, _, *rest = given
            return jax.grad(lambda x: (function(x, w, *rest, epilogue=activated) ** 2).sum())(x).sum()

        return lambda w: jax.grad(slope)(w)

    found, low = twice(fused_matmul)(given[1]), twice(fused_reference)(given[1])
    assert_close(found, in_float64(twice(fused_reference), given[1]), low, length=20, factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e"])
def test_compiles_without_spills(target: str) -> None:
    pytest.importorskip("triton" if target.startswith("cuda") else "libtpu", reason=f"compiles for {target}")
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    given = square, square, (jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16), square)
    settings = {"epilogue": activated, "saves": True, "transpose_lhs": False, "transpose_rhs": False}
    compiled = fused_matmul_forward.trace(*given, **settings, target=target).lower(target).compile()
    assert target.startswith("tpu") or compiled.resources.spills == 0


X, W = jnp.zeros((2, 3)), jnp.zeros((3, 4))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("given", "epilogue", "got"),
    [
        ((X, jnp.zeros((2, 4))), unchanged, "rhs = float32[2, 4]"),
        ((X, jnp.zeros((3, 4), jnp.bfloat16)), unchanged, "rhs = bfloat16[3, 4]"),
        ((jnp.zeros((3, 2, 3)), jnp.zeros((2, 3, 4))), unchanged, "rhs = float32[2, 3, 4]"),
        ((X, W, jnp.zeros(2)), shifted, "operand 0 of fused_matmul does not broadcast"),
        ((X, W, jnp.zeros(4, jnp.int32)), shifted, "int32[4]"),
        ((X, W, jnp.zeros((1, 2, 4))), shifted, "operand 0 of fused_matmul does not broadcast"),
        ((X, W), lambda product: product[None], "float32[1]"),
        ((X, W), lambda product: product > 0, "bool[]"),
        ((X, W), None, "epilogue = None"),
        ((jnp.zeros((2, 2, 3)), W, jnp.zeros((3, 1, 1))), shifted, "operand 0 of fused_matmul does not broadcast"),
    ],
)
def test_arguments_that_do_not_fit(given: Any, epilogue: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        fused_matmul(*given, epilogue=epilogue)  # here
    assert "# here" in caught.value.loc.snippet()
