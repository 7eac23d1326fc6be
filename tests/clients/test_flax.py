"""Flax: layers of NNX and Linen on our attention, dropout included; norms, optimizers and patches."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tilekern import nn as ours
from tilekern import training
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


@pytest.mark.parametrize("theirs", [nnx.dot_product_attention, linen.dot_product_attention])
def test_every_parameter_of_flax_is_one_of_ours(theirs: Any) -> None:
    mine, of_flax = (inspect.signature(f).parameters for f in (ours.attention_fn, theirs))
    for name, parameter in of_flax.items():
        assert name == "promote_dtype" or mine[name].default == parameter.default


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


# --- norms, optimizers, patches ---------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {
    "rms_norm": lambda **o: nnx.RMSNorm(32, **o),
    "layer_norm": lambda **o: nnx.LayerNorm(32, **o),
    "group_norm": lambda **o: nnx.GroupNorm(32, num_groups=8, **o),
}


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_nnx(name: str, dtype: Any) -> None:
    """Also on variables themselves."""
    layer = NORMS[name](dtype=dtype, use_fast_variance=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    layer.scale[...] = jnp.linspace(0.5, 2, 32)
    variables = [layer.scale] if name == "rms_norm" else [layer.scale, layer.bias]
    more = {"num_groups": 8} if name == "group_norm" else {}
    found, expected = getattr(ours, name)(x, *variables, dtype=dtype, **more), layer(x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-5 if dtype is None else 0.02, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_nnx_trains_with_our_optimizers(name: str) -> None:
    def train(optimizer: Any) -> Any:
        model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
        holder = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, holder: Any) -> Any:
            value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(X) - X[..., :1]) ** 2))(model)
            holder.update(model, gradients)
            return value

        return [float(step(model, holder)) for _ in range(20)]

    optax = pytest.importorskip("optax", reason="needs optax")
    mine, theirs = {
        "adamw": (training.adamw(0.01), optax.adamw(0.01)),
        "muon": (training.muon(0.01, dtype="float32"), optax.contrib.muon(0.01)),
    }[name]
    losses = train(mine)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, train(theirs), rtol=1e-4)


def test_a_layer_of_nnx_within_a_patch() -> None:
    layer = of_nnx(nnx.dot_product_attention)
    expected = layer(X, mask=CAUSAL)
    with tk.patch("dot_product_attention", strict=True):
        np.testing.assert_allclose(layer(X, mask=CAUSAL), expected, rtol=1e-4, atol=1e-5)
        assert "tilekern_call" in str(jax.make_jaxpr(lambda x: layer(x, mask=CAUSAL))(X))
    assert "tilekern_call" not in str(jax.make_jaxpr(lambda x: layer(x, mask=CAUSAL))(X))
