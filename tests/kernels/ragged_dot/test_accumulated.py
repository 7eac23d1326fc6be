"""Grouped products that are added to an array, and results of another dtype than the operands'."""

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
from tilekern.kernels.quantization import dequantize, quantize
from tilekern.kernels.ragged_dot import contracting_reference, ragged_contracting_dot, ragged_dot, reference
from tilekern.testing import arrays, assert_close, in_float64

SIZES = np.array([5, 0, 7, 3], np.int32)
ROWS, INNER, COLUMNS = 20, 12, 9
# function, definition, and the shapes of the operands and of the result
PRODUCTS = {
    "ragged_dot": (ragged_dot, reference, (ROWS, INNER), (4, INNER, COLUMNS), (ROWS, COLUMNS)),
    "contracting": (ragged_contracting_dot, contracting_reference, (ROWS, INNER), (ROWS, COLUMNS), (4, INNER, COLUMNS)),
}
every_product = pytest.mark.parametrize("name", PRODUCTS)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def problem(name: str, dtype: Any, out_dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    *_, lhs, rhs, out = PRODUCTS[name]
    return normal(*lhs, dtype=dtype), normal(*rhs, dtype=dtype, seed=1), normal(*out, dtype=out_dtype, seed=2)


def definition(lhs: Any, rhs: Any, total: Any, sizes: Any = SIZES, *, name: str, dtype: Any = None) -> Any:
    """The sum in the dtype of the total, or in `dtype`."""
    wide = dtype or jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) + PRODUCTS[name][1](lhs.astype(wide), rhs.astype(wide), sizes)).astype(total.dtype)


@pytest.mark.sweep(2)
@every_product
@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
@settings(max_examples=2)
@given(data=st.data(), sizes=group_sizes(4, 9))
def test_the_product_is_added(name: str, dtype: str, out: str, data: st.DataObject, sizes: np.ndarray) -> None:
    function, _, *shapes = PRODUCTS[name]
    lhs, rhs, total = (data.draw(arrays(jnp.dtype(d), s)) for s, d in zip(shapes, (dtype, dtype, out), strict=True))
    found = function(lhs, rhs, sizes, accumulate=total, **data.draw(st.sampled_from(BLOCKS)))
    oracle = in_float64(partial(definition, name=name), lhs, rhs, total, sizes)
    assert_close(found, oracle, jax.jit(partial(definition, name=name))(lhs, rhs, total, sizes), length=ROWS)


@every_product
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_of_another_dtype(name: str, dtype: str) -> None:
    function, theirs, *_ = PRODUCTS[name]
    lhs, rhs, _ = problem(name, dtype)
    found = function(lhs, rhs, SIZES, out_dtype=jnp.float32)
    wide = (x.astype(jnp.float32) for x in (lhs, rhs))
    assert found.dtype == jnp.float32
    assert_close(found, in_float64(theirs, lhs, rhs, SIZES), theirs(*wide, SIZES), length=ROWS)


@every_product
def test_empty_groups_and_rows_of_no_group_stay(name: str) -> None:
    lhs, rhs, total = problem(name, jnp.bfloat16)
    found = PRODUCTS[name][0](lhs.at[15:].set(jnp.nan), rhs, SIZES, accumulate=total)
    same = slice(15, None) if name == "ragged_dot" else slice(1, 2)
    np.testing.assert_array_equal(found[same], total[same])
    assert (found[:1] != total[:1]).all()


@every_product
def test_nothing_to_multiply(name: str) -> None:
    function, *_ = PRODUCTS[name]
    lhs, rhs, total = problem(name, jnp.float32)
    np.testing.assert_array_equal(function(lhs, rhs, 0 * SIZES, accumulate=total), total)
    none = (lhs[:, :0], rhs[:, :0]) if name == "ragged_dot" else (lhs[:0], rhs[:0])
    np.testing.assert_array_equal(function(*none, SIZES, accumulate=total), total)


@every_product
def test_gradients(name: str) -> None:
    """By both operands and the array; those of bfloat16 operands are rounded to bfloat16, that of the array is not."""
    function, *_ = PRODUCTS[name]
    given = problem(name, jnp.bfloat16)
    cotangent = normal(*given[2].shape, seed=3)

    def ours(lhs: Any, rhs: Any, total: Any) -> Any:
        return (function(lhs, rhs, SIZES, accumulate=total) * cotangent).sum()

    def theirs(lhs: Any, rhs: Any, total: Any, dtype: Any = None) -> Any:
        return (definition(lhs, rhs, total, name=name, dtype=dtype) * cotangent).sum()

    found, low = jax.grad(ours, (0, 1, 2))(*given), jax.grad(partial(theirs, dtype=jnp.bfloat16), (0, 1, 2))(*given)
    high = in_float64(jax.grad(theirs, (0, 1, 2)), *given)
    for one, naive, exact in zip(found, low, high, strict=True):
        assert_close(one, exact, naive, length=ROWS, factor=3)
    np.testing.assert_array_equal(found[2], cotangent)


@pytest.mark.one_backend
@every_product
def test_second_derivatives_in_both_modes(name: str) -> None:
    given = problem(name, jnp.float32)

    def along_itself(function: Any) -> Any:
        slope = jax.grad(lambda *a: (function(*a) ** 2).sum(), (0, 1, 2))
        return lambda *a: jax.jvp(slope, a, a)[1]

    ours = along_itself(lambda lhs, rhs, total: PRODUCTS[name][0](lhs, rhs, SIZES, accumulate=total))
    theirs = along_itself(partial(definition, name=name))
    for one, low, high in zip(ours(*given), theirs(*given), in_float64(theirs, *given), strict=True):
        assert_close(one, high, low, length=ROWS * INNER, factor=3)


@pytest.mark.one_backend
@every_product
def test_a_donated_array_is_updated_in_place(name: str) -> None:
    lhs, rhs, total = problem(name, jnp.bfloat16)
    call = jax.jit(lambda total: PRODUCTS[name][0](lhs, rhs, SIZES, accumulate=total), donate_argnums=0)
    assert call.lower(total).compile().memory_analysis().alias_size_in_bytes == total.nbytes


@pytest.mark.one_backend
def test_gradients_of_several_batches() -> None:
    """A scan over batches, whose carry is the sum of gradients in float32; the array before the scan is not changed."""
    lhs, rhs = normal(3, ROWS, INNER, dtype=jnp.bfloat16), normal(3, ROWS, COLUMNS, dtype=jnp.bfloat16, seed=1)
    start = normal(4, INNER, COLUMNS, seed=2)
    before = np.array(start)

    @jax.jit
    def total(start: Any) -> Any:
        def add(total: Any, batch: Any) -> Any:
            return ragged_contracting_dot(*batch, SIZES, accumulate=total), None

        return jax.lax.scan(add, start, (lhs, rhs))[0]

    parts = (
        contracting_reference(a.astype(jnp.float32), b.astype(jnp.float32), SIZES)
        for a, b in zip(lhs, rhs, strict=True)
    )
    low = start + sum(parts)
    exact = np.asarray(before, np.float64) + sum(
        in_float64(contracting_reference, a, b, SIZES) for a, b in zip(lhs, rhs, strict=True)
    )
    assert_close(total(start), exact, low, length=3 * ROWS)
    np.testing.assert_array_equal(start, before)


@every_product
def test_under_vmap(name: str) -> None:
    function, *_ = PRODUCTS[name]
    lhs, rhs, total = problem(name, jnp.float32)
    several = jnp.stack([total, 2 * total])
    found = jax.vmap(lambda lhs, total: function(lhs, rhs, SIZES, accumulate=total))(jnp.stack([lhs, -lhs]), several)
    for n, one in enumerate(found):
        np.testing.assert_array_equal(one, function((1 - 2 * n) * lhs, rhs, SIZES, accumulate=several[n]))


def test_with_scales() -> None:
    lhs, rhs, total = normal(ROWS, 32), normal(4, 32, COLUMNS, seed=1), normal(ROWS, COLUMNS, seed=2)
    (left, of_lhs), (right, of_rhs) = quantize(lhs, (1, 16)), quantize(rhs, (None, 1))
    found = ragged_dot(left, right, SIZES, lhs_scale=of_lhs, rhs_scale=of_rhs, accumulate=total)
    given = dequantize(left, of_lhs), dequantize(right, of_rhs), total
    call = partial(definition, name="ragged_dot")
    assert_close(found, in_float64(call, *given), jax.jit(call)(*given), length=32)


@pytest.mark.one_backend
@every_product
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"accumulate": jnp.zeros((2, 2))}, "accumulate = float32[2, 2]"),
        ({"accumulate": 1.0}, "accumulate = 1.0"),
        ({"out_dtype": "bfloat16"}, "out_dtype = 'bfloat16' (str), accumulate = float32["),
    ],
)
def test_arrays_that_do_not_fit(name: str, change: dict[str, Any], got: str) -> None:
    lhs, rhs, total = problem(name, jnp.float32)
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        PRODUCTS[name][0](lhs, rhs, SIZES, **{"accumulate": total} | change)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@every_product
def test_integers_cannot_be_added_to(name: str) -> None:
    lhs, rhs, total = problem(name, jnp.float32)
    with pytest.raises(ArgumentError, match=re.escape("accumulate = int32[")):
        PRODUCTS[name][0](lhs, rhs, SIZES, accumulate=total.astype(jnp.int32))
