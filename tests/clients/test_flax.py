"""Flax: layers of NNX and Linen on our attention, dropout included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern import nn as ours
from tilekern.errors import ArgumentError
from tilekern.testing import assert_close, in_float64

pytest.importorskip("flax", reason="needs flax")

from flax import linen, nnx

B, T, WIDTH, HEADS = 2, 12, 16, 4
X = np.random.default_rng(0).standard_normal((B, T, WIDTH), np.float32)
CAUSAL = np.asarray(linen.make_causal_mask(np.ones((B, T))))  # float32 of 0 and 1: so Flax makes masks
KEY = jax.random.key(0)
MASKS = pytest.mark.parametrize("mask", [None, CAUSAL], ids=["whole", "causal"])


def of_nnx(attention: Any, **options: Any) -> Any:
    rngs = nnx.Rngs(0, dropout=1)
    return nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention, decode=False, rngs=rngs, **options)


def of_linen(attention: Any, **options: Any) -> Any:
    return linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention, **options)


def check(ours: Any, theirs: Any, weights: Any) -> None:
    """Values and gradients of functions of (weights, x) are those of Flax' attention, by the rule."""

    leaves, tree = jax.tree.flatten(weights)

    def results(function: Any) -> Any:
        def loss(leaves: Any, x: Any) -> Any:
            out = function(tree.unflatten(leaves), x)
            return jnp.sum(jnp.sin(out)), out

        return lambda x, *leaves: jax.tree.leaves(jax.value_and_grad(loss, (0, 1), has_aux=True)(leaves, x))

    oracle = in_float64(results(theirs), X, *leaves)
    for found, exact, naive in zip(results(ours)(X, *leaves), oracle, results(theirs)(X, *leaves), strict=True):
        assert_close(found, exact, naive, length=B * T * WIDTH, factor=3)


@MASKS
def test_a_layer_of_nnx(mask: Any) -> None:
    def functional(attention: Any) -> tuple[Any, Any]:
        graph, weights, others = nnx.split(of_nnx(attention), nnx.Param, ...)
        return lambda w, x: nnx.merge(graph, w, others)(x, mask=mask), weights

    (mine, weights), (theirs, _) = functional(ours.attention_fn), functional(nnx.dot_product_attention)
    check(mine, theirs, weights)


@MASKS
def test_a_layer_of_linen(mask: Any) -> None:
    mine, theirs = of_linen(ours.attention_fn), of_linen(linen.dot_product_attention)
    weights = theirs.init(KEY, X)
    check(lambda w, x: mine.apply(w, x, mask=mask), lambda w, x: theirs.apply(w, x, mask=mask), weights)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_linen_drops_weights_by_its_key() -> None:
    """Also with `dot_product_attention`: Linen passes its rate to functions that have a parameter of this name."""
    for attention in (ours.attention_fn, ours.dot_product_attention):
        layer = of_linen(attention, dropout_rate=0.5)
        weights = layer.init(KEY, X, deterministic=True)
        whole = layer.apply(weights, X, deterministic=True)
        np.testing.assert_array_equal(whole, of_linen(attention).apply(weights, X))

        def drop(key: Any, layer: Any = layer, weights: Any = weights) -> Any:
            return layer.apply(weights, X, deterministic=False, rngs={"dropout": key})

        results = np.asarray(jax.jit(jax.vmap(drop))(jax.random.split(KEY, 400)))
        assert (results.std(axis=0) > 0.01 * np.abs(whole).mean()).all()
        # The layer is linear in the weights of attention, whose means are the weights without dropout.
        assert (np.abs(results.mean(axis=0) - whole) < 6 * results.std(axis=0) / np.sqrt(len(results))).all()
        with pytest.raises(Exception, match="dropout"):
            layer.apply(weights, X, deterministic=False)


def test_nnx_drops_weights_by_its_key() -> None:
    layer = of_nnx(ours.attention_fn, dropout_rate=0.5)
    first, second = (layer(X, deterministic=False) for _ in range(2))
    assert not np.allclose(first, second)
    again = of_nnx(ours.attention_fn, dropout_rate=0.5)(X, deterministic=False)
    np.testing.assert_array_equal(first, again)
    own = of_nnx(ours.attention_fn, dropout_rate=0.5, broadcast_dropout=False)(X, deterministic=False)
    assert not np.allclose(first, own)
    np.testing.assert_array_equal(layer(X, deterministic=True), of_nnx(ours.attention_fn)(X))


# --- other options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [of_nnx, of_linen])
def test_a_layer_of_bfloat16(make: Any) -> None:
    def run(attention: Any) -> Any:
        layer = make(attention, dtype=jnp.bfloat16, precision="high")
        return layer(X) if make is of_nnx else layer.apply(layer.init(KEY, X), X)

    mine = run(ours.attention_fn)
    assert mine.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(mine), np.float32(run(nnx.dot_product_attention)), atol=0.02)


def test_weights_are_not_sown() -> None:
    layer = of_linen(ours.attention_fn)
    with pytest.raises(ArgumentError, match="attention_fn cannot take this module"):
        layer.apply(layer.init(KEY, X), X, sow_weights=True)
    with pytest.raises(ArgumentError, match="attention_fn cannot take this module"):
        of_nnx(ours.attention_fn)(X, sow_weights=True)


def test_masks_of_numbers_are_refused_where_jax_refuses_them() -> None:
    layer = of_linen(ours.dot_product_attention)
    with pytest.raises(ArgumentError, match="mask = float32") as raised:
        layer.init(KEY, X, mask=CAUSAL)
    assert "attention_fn" in raised.value.fix
