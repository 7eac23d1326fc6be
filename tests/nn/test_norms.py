"""Norms by the arguments of Flax: values, dtypes, defaults, errors. tests/clients compares with its layers."""

from __future__ import annotations

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
X = RANDOM.standard_normal((2, 5, 64), np.float32) + 3
SCALE, BIAS = RANDOM.standard_normal((2, 64), np.float32)


def rms(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def layer(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6) * scale + bias


def group(x: Any, scale: Any, bias: Any, groups: int = 32) -> Any:
    parts = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    centred = parts - parts.mean(axis=(1, 3), keepdims=True)
    out = centred / jnp.sqrt(jnp.mean(centred * centred, axis=(1, 3), keepdims=True) + 1e-6)
    return out.reshape(x.shape) * scale + bias


NORMS = {"rms_norm": (rms, (SCALE,)), "layer_norm": (layer, (SCALE, BIAS)), "group_norm": (group, (SCALE, BIAS))}


@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_with_the_defaults(name: str) -> None:
    definition, vectors = NORMS[name]

    def results(function: Any) -> Any:
        everything = tuple(range(1 + len(vectors)))
        gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), everything)
        return jax.jit(lambda *a: (function(*a), *gradient(*a)))

    oracle = in_float64(results(definition), X, *vectors)
    found, low = (results(f)(X, *vectors) for f in (getattr(nn, name), definition))
    for out, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(out, exact, naive, length=X.size, factor=3)


@pytest.mark.parametrize("name", NORMS)
def test_dtypes_promote_as_in_flax(name: str) -> None:
    function, (_, vectors) = getattr(nn, name), NORMS[name]
    narrow = X.astype(jnp.bfloat16)
    assert function(narrow).dtype == jnp.bfloat16
    np.testing.assert_array_equal(function(narrow, *vectors), function(narrow.astype(np.float32), *vectors))
    found = function(X, *vectors, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, function(narrow, *(v.astype(jnp.bfloat16) for v in vectors)))
    whole = np.round(X).astype(np.int32)
    np.testing.assert_array_equal(function(whole), function(whole.astype(np.float32)))


def test_epsilon_and_groups() -> None:
    tiny = 1e-3 * X
    assert np.abs(nn.layer_norm(tiny, epsilon=1.0)).max() < 0.1 < np.abs(nn.layer_norm(tiny)).max()
    assert np.abs(nn.rms_norm(tiny, epsilon=1.0)).max() < 0.1 < np.abs(nn.rms_norm(tiny)).max()
    of_size = nn.group_norm(X, SCALE, BIAS, num_groups=None, group_size=16)
    np.testing.assert_array_equal(of_size, nn.group_norm(X, SCALE, BIAS, num_groups=4))
    np.testing.assert_allclose(of_size, group(X, SCALE, BIAS, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
def test_errors(name: str) -> None:
    function, summary = getattr(nn, name), f"the arrays of {name} do not fit"
    narrow: dict[str, Any] = {"dtype": jnp.float8_e4m3fn}
    for scale, options, got in (
        (np.ones(3, np.float32), {}, "scale = float32[3]"),
        (None, narrow, "x = float8_e4m3fn"),
    ):
        with refused(ArgumentError, summary, expected="at least 16 bits", got=got, fix="last axis"):
            function(X, scale, **options)  # <-


def test_both_numbers_of_groups() -> None:
    with pytest.raises(ArgumentError, match="num_groups = 32, group_size = 16"):
        nn.group_norm(X, group_size=16)
