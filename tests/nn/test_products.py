"""`ragged_dot` is that of jax.lax, `scaled_matmul` that of jax.nn."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern import nn
from tilekern.errors import ArgumentError
from tilekern.testing import assert_close, in_float64

RANDOM = np.random.default_rng(0)
LHS, RHS = RANDOM.standard_normal((20, 8), np.float32), RANDOM.standard_normal((3, 8, 5), np.float32)
SIZES = np.array([7, 0, 9], np.int32)


@pytest.mark.parametrize("name", ["ragged_dot", "scaled_matmul"])
def test_the_signature_is_that_of_jax(name: str) -> None:
    theirs = jax.lax.ragged_dot if name == "ragged_dot" else jax.nn.scaled_matmul
    ours, of_jax = (inspect.signature(f).parameters.values() for f in (getattr(nn, name), theirs))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in of_jax]
    for a, b in zip(ours, of_jax, strict=True):
        assert a.default == b.default or jnp.dtype(a.default) == jnp.dtype(b.default)


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_dot(dtype: str, preferred: Any) -> None:
    arrays = LHS.astype(dtype), RHS.astype(dtype), SIZES
    found, low = (f(*arrays, preferred_element_type=preferred) for f in (nn.ragged_dot, jax.lax.ragged_dot))
    assert found.dtype == low.dtype and (np.asarray(found)[16:] == 0).all()
    exact = in_float64(partial(jax.lax.ragged_dot, precision="highest"), *arrays)
    rounded = jax.lax.ragged_dot(*arrays, preferred_element_type=found.dtype)
    assert_close(found, exact, rounded, length=8)


def test_gradients_of_ragged_dot() -> None:
    def loss(function: Any, lhs: Any, rhs: Any) -> Any:
        return jnp.sum(jnp.sin(function(lhs, rhs, SIZES, precision="highest")))

    found, low = (jax.grad(partial(loss, f), (0, 1))(LHS, RHS) for f in (nn.ragged_dot, jax.lax.ragged_dot))
    oracle = in_float64(jax.grad(partial(loss, jax.lax.ragged_dot), (0, 1)), LHS, RHS)
    for out, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(out, exact, naive, length=20, factor=3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "group_offset": ({"group_offset": jnp.int32(1)}, "group_offset = int32[]"),
    "out_sharding": ({"out_sharding": jax.P()}, "out_sharding = "),
    "precision": ({"precision": jax.lax.DotAlgorithmPreset.TF32_TF32_F32}, "precision = "),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_ragged_dot_refuses_by_name(name: str) -> None:
    options, got = WRONG[name]
    with refused(ArgumentError, f"ragged_dot cannot take this {name}", expected="None", got=got, fix=""):
        nn.ragged_dot(LHS, RHS, SIZES, **options)  # <-


def test_arrays_that_ragged_dot_refuses() -> None:
    whole = np.ones((20, 8), np.int8), np.ones((3, 8, 5), np.int8)
    for arrays in ((*whole, SIZES), (LHS.astype(jnp.bfloat16), RHS, SIZES), (LHS[None], RHS, SIZES)):
        with refused(ArgumentError, "the arrays of ragged_dot do not fit", expected="lhs[M, K]", got="", fix=""):
            nn.ragged_dot(*arrays)  # <-


# --- scaled products --------------------------------------------------------------------------------------------------


def scaled(dtype: Any, scales: Any, block: int) -> list[Any]:
    def numbers(rows: int) -> Any:
        return jnp.asarray(3 * RANDOM.standard_normal((2, rows, 64))).astype(dtype)

    def powers(rows: int) -> Any:
        return jnp.asarray(2.0 ** RANDOM.integers(-3, 3, (2, rows, 64 // block))).astype(scales)

    return [numbers(9), numbers(7), powers(9), powers(7)]


@pytest.mark.parametrize(
    ("dtype", "scales", "block"),
    [
        ("float8_e4m3fn", "float8_e8m0fnu", 32),
        ("float4_e2m1fn", "float8_e4m3fn", 16),
        ("float8_e5m2", "float32", 64),
        ("int8", "float32", 32),
        ("bfloat16", "float32", 32),
    ],
)
@pytest.mark.parametrize("preferred", [jnp.float32, jnp.bfloat16])
def test_scaled_products(dtype: str, scales: str, block: int, preferred: Any) -> None:
    arrays = scaled(dtype, scales, block)
    lhs, rhs, of_lhs, of_rhs = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    wide = [x * np.repeat(s, block, axis=-1) for x, s in ((lhs, of_lhs), (rhs, of_rhs))]
    found = nn.scaled_matmul(*arrays, preferred_element_type=preferred)
    assert found.shape == (2, 9, 7) and found.dtype == preferred
    low = jnp.einsum("bmk,bnk->bmn", *(x.astype(jnp.float32) for x in wide)).astype(preferred)
    assert_close(found, np.einsum("bmk,bnk->bmn", *wide), low, length=64)


def test_arrays_that_scaled_matmul_refuses() -> None:
    lhs, rhs, of_lhs, of_rhs = scaled("float8_e4m3fn", "float32", 32)
    summary = "the arrays of scaled_matmul do not fit"
    wrong = ((lhs[0], rhs, of_lhs, of_rhs), (lhs, rhs, of_lhs[:, :1], of_rhs), (lhs, rhs[..., :32], of_lhs, of_rhs))
    for arrays in (*wrong, (lhs, rhs, of_lhs, of_rhs.astype(jnp.int32)), (lhs, rhs, of_lhs, of_rhs[..., :1])):
        with refused(ArgumentError, summary, expected="lhs[B, M, K]", got="lhs = float8_e4m3fn", fix=""):
            nn.scaled_matmul(*arrays)  # <-
    with pytest.raises(ArgumentError):
        nn.scaled_matmul(lhs.astype(jnp.int32), rhs, of_lhs, of_rhs)
