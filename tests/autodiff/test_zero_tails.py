"""Derivatives of kernels whose factors are infinite or NaN where a tile reaches over the end of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import Source, at, func, ref, tile, whole
from tests.lang.checks import like_first
from tilekern.autodiff.zero_tails import zero_tails
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.core import Axis, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.types import F64
from tilekern.testing import assert_close

RANDOM = np.random.default_rng(0)
W = RANDOM.uniform(0.5, 2, 3)

ON_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "a quotient": lambda x, w: w / x,
    "a logarithm": lambda x, w: w * jnp.log(x),
    "a power": lambda x, w: x**w,
    "a norm": lambda x, w: w * x / jnp.sqrt((x * x).sum(axis=1, keepdims=True)),
    "a product of matrices": lambda x, w: jnp.dot(1 / x, jnp.outer(w, w), precision="highest"),
    "rows of columns": lambda x, w: (w[:, None] / x.T).T,
    "a choice": lambda x, w: jnp.where(x > 1, w / x, w * jnp.sqrt(x)),
}


def rows(function: Callable[[Any, Any], Any], block: int) -> tk.Kernel:
    @like_first
    def kernel(x, w, out):
        i = tk.parallel(x.shape[0], block)
        out[i, :] = function(x[i, :], w[:])

    return kernel


def expect(kernel: Callable[..., Any], plain: Callable[..., Any], length: int) -> None:
    """Gradients and tangents are those of plain JAX on the whole array, in float64."""
    x = RANDOM.uniform(0.5, 2, (length, 3))
    cotangent = jax.tree.map(lambda o: RANDOM.standard_normal(o.shape), jax.eval_shape(plain, x, W))
    for mode in ("grad", "jvp"):

        def derivative(function: Callable[..., Any], dtype: Any, mode: str = mode) -> list[np.ndarray]:
            arrays = [jnp.asarray(a, dtype) for a in (x, W)]
            if mode == "jvp":
                return [np.asarray(jax.jvp(function, arrays, [jnp.cos(a) for a in arrays])[1])]
            return [*map(np.asarray, jax.vjp(function, *arrays)[1](jnp.asarray(cotangent, dtype)))]

        with jax.enable_x64(True):
            exact = derivative(plain, np.float64)
        naive = derivative(plain, np.float32)
        for got, wanted, low in zip(derivative(kernel, np.float32), exact, naive, strict=True):
            assert_close(got, wanted, low, length=64, factor=4)


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 10])
@pytest.mark.parametrize("name", ON_ROWS)
def test_rows_of_the_last_tile(name: str, length: int) -> None:
    expect(rows(ON_ROWS[name], 4), ON_ROWS[name], length)


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("name", ["a quotient", "a logarithm", "a power"])
def test_sums_over_the_tiles_of_a_loop(name: str, length: int) -> None:
    """Lanes behind the end would count in such a sum, so the kernel masks them; the derivative of the mask is 0."""

    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((3,), x.dtype))
    def summed(x, w, out):
        def step(k, total):
            return total + jnp.where(
                k.valid[:, None], ON_ROWS[name](jnp.where(k.valid[:, None], x[k, :], 1), w[:]), 0
            ).sum(0)

        out[:] = tk.fold(tk.serial(x.shape[0], 4), step, jnp.zeros(3, x.dtype))

    expect(summed, lambda x, w: ON_ROWS[name](x, w).sum(axis=0), length)


def test_the_tangent_of_a_sum_of_roots() -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((), x.dtype)))
    def roots(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[()].add(jnp.sqrt(x[i, :]).sum())

    x = jnp.asarray(RANDOM.uniform(0.5, 2, (10, 3)), np.float32)
    tangent = jax.jvp(roots, (x,), (x,))[1]
    np.testing.assert_allclose(tangent, jnp.sqrt(x).sum() / 2, rtol=1e-6)


def test_tiles_that_are_whole_have_no_mask() -> None:
    kernel = rows(ON_ROWS["a quotient"], 4)
    for length, masks in ((8, 0), (10, 1)):
        x, w = (jnp.ones(shape, np.float32) for shape in ((length, 3), (3,)))
        stages = kernel.trace(x, w).gradient()
        assert str(stages).count("select(") == masks


def _sums_of_tiles(fill: float | None, factor: float | None) -> tuple[str, np.ndarray]:
    """(text, value) of out[i] = the sum of a tile of x, of 6 elements in tiles of 4, over y or times a factor."""
    x, y, out = ref("x", (6,), dtype=F64), ref("y", (6,), dtype=F64), ref("out", (2,), "out", F64)

    def body(b: Source, i: Value) -> None:
        lanes = tile(i, 4)
        read = b.load(x, lanes) if fill is None else b.load(x, lanes, fill=b.const(fill, (), F64))
        by = b.ew("div", read, b.load(y, lanes)) if factor is None else b.ew("mul", read, b.const(factor, (4,), F64))
        b.store(out, b.op(Reduce, by, monoid="sum", dims=(0,)), at(i))

    result = zero_tails(func("f", (x, y, out), (Axis("i", 6, 4),), body), [x])
    with np.errstate(invalid="ignore"):
        (sums,) = interpret(result, np.arange(6.0), np.full(6, 2.0))
    return str(result), sums


def test_a_tail_of_zeros_that_is_divided_by_zeros_adds_nothing() -> None:
    for fill in (None, 0.0):
        text, sums = _sums_of_tiles(fill, None)
        assert "select(" in text
        np.testing.assert_array_equal(sums, [3.0, 4.5])


def test_a_tail_of_another_number_stays() -> None:
    assert "select(" not in _sums_of_tiles(1.0, None)[0]


def test_a_tail_of_zeros_times_a_finite_number_has_no_mask() -> None:
    for factor in (2.0, 1e300, np.inf):
        assert ("select(" in _sums_of_tiles(None, factor)[0]) == np.isinf(factor)


def test_a_tail_of_zeros_that_a_product_pairs_with_infinities_adds_nothing() -> None:
    x, y, out = ref("x", (1, 6), dtype=F64), ref("y", (6, 1), dtype=F64), ref("out", (2, 1), "out", F64)

    def body(b: Source, i: Value) -> None:
        inverse = b.ew("div", b.const(1.0, (4, 1), F64), b.load(y, tile(i, 4), whole(1)))
        product = b.op(Dot, b.load(x, whole(1), tile(i, 4)), inverse, contract=((1,), (0,)))
        b.store(out, product, tile(i, 1), whole(1))

    result = zero_tails(func("f", (x, y, out), (Axis("i", 6, 4),), body), [x])
    with np.errstate(divide="ignore"):
        (sums,) = interpret(result, np.arange(6.0)[None], np.full((6, 1), 2.0))
    np.testing.assert_array_equal(sums[:, 0], [3.0, 4.5])
