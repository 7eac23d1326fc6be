"""Dropout of `dot_product_attention` and `attention_fn`: what is dropped, by which key, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.nn import attention_fn, dot_product_attention

FUNCTIONS = pytest.mark.parametrize("attention", [dot_product_attention, attention_fn], ids=lambda f: f.__name__)
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.standard_normal((2, length, 4, 8), np.float32) for length in (24, 40, 40))
KEY = jax.random.key(3)


@FUNCTIONS
@pytest.mark.parametrize("broadcast", [True, False])
def test_weights_are_dropped_by_the_key(attention: Any, broadcast: bool) -> None:
    expected = flash_attention(Q, K, V, dropout_rate=0.25, dropout_key=KEY, dropout_broadcast=broadcast)
    for rng in (KEY, jax.random.key_data(KEY)):
        found = attention(Q, K, V, dropout_rate=0.25, dropout_rng=rng, broadcast_dropout=broadcast)
        np.testing.assert_array_equal(found, expected)
    assert (np.asarray(found) != attention(Q, K, V)).mean() > 0.9


@FUNCTIONS
def test_the_same_pairs_are_dropped_everywhere_unless_told_otherwise(attention: Any) -> None:
    """Equal weights, and values of 1: a result counts the keys that are left."""
    zeros, ones = np.zeros_like(Q), np.ones_like(V)
    counts = np.asarray(attention(zeros, K, ones, dropout_rate=0.5, dropout_rng=KEY))[..., 0]  # [B, T, N]
    assert (counts == counts[:1, :, :1]).all() and len(np.unique(counts)) > 5
    # Each is the mean of 40 weights that are 0 or 2.
    assert abs(counts[0, :, 0].mean() - 1) < 6 / np.sqrt(40 * 24)
    own = np.asarray(attention(zeros, K, ones, dropout_rate=0.5, dropout_rng=KEY, broadcast_dropout=False))[..., 0]
    assert not (own == own[:1, :, :1]).all()


@FUNCTIONS
def test_nothing_is_dropped(attention: Any) -> None:
    whole = attention(Q, K, V)
    for options in ({"dropout_rate": 0.5, "deterministic": True}, {"dropout_rng": KEY}, {"dropout_rate": 0}):
        np.testing.assert_array_equal(attention(Q, K, V, **options), whole)
    np.testing.assert_array_equal(attention(Q, K, V, dropout_rate=1.0, dropout_rng=KEY), 0 * whole)


@FUNCTIONS
def test_keys_of_other_kinds(attention: Any) -> None:
    """Also under jit and vmap. A key of another kind seeds one of threefry."""
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
    drop = jax.jit(lambda key: attention(Q, K, V, dropout_rate=0.5, dropout_rng=key))
    first, second = map(drop, keys)
    np.testing.assert_array_equal(first, drop(keys[0]))
    assert not (first == second).all()
    threefry = jax.random.split(KEY, 2)
    np.testing.assert_allclose(jax.vmap(drop)(threefry), jnp.stack(list(map(drop, threefry))), rtol=1e-6, atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dropout_rng": ({"dropout_rate": 0.5}, "dropout_rng = None"),
    "dropout_rate": ({"dropout_rate": 1.5, "dropout_rng": KEY}, "dropout_rate = 1.5"),
    "deterministic": ({"dropout_rate": 0.5, "deterministic": None}, "deterministic = None"),
    "broadcast_dropout": ({"dropout_rate": 0.5, "broadcast_dropout": 1}, "broadcast_dropout = 1"),
}


@FUNCTIONS
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(attention: Any, name: str) -> None:
    options, got = WRONG[name]
    with refused(ArgumentError, f"{attention.__name__} cannot take this {name}", expected="", got=got, fix=""):
        attention(Q, K, V, **options)  # <-


def test_a_traced_rate_is_refused() -> None:
    with pytest.raises(ArgumentError, match="static number from 0 to 1"):
        jax.jit(lambda rate: attention_fn(Q, K, V, dropout_rate=rate, dropout_rng=KEY))(0.5)
