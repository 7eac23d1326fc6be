"""Keras: its variables as arguments, and its layers on our kernels."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

import tilekern as tk
from tilekern import nn
from tilekern.kernels.matmul import matmul
from tilekern.kernels.swiglu import swiglu

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="needs keras")

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


def test_variables_are_arrays() -> None:
    x, weight, w = keras.Variable(X), keras.Variable(np.ones(64, np.float32)), keras.Variable(X.T @ X)
    np.testing.assert_array_equal(nn.rms_norm(x, weight), nn.rms_norm(X, np.ones(64, np.float32)))
    np.testing.assert_array_equal(swiglu(x, x), swiglu(X, X))
    np.testing.assert_array_equal(matmul(x, w), matmul(X, X.T @ X))
    q = keras.Variable(X.reshape(1, 4, 4, 16))
    np.testing.assert_array_equal(nn.dot_product_attention(q, q, q), nn.dot_product_attention(*[q.value] * 3))
    gradient = jax.grad(lambda x: nn.layer_norm(x, weight).sum())(X)
    assert gradient.shape == X.shape


def test_layers_run_on_our_kernels_within_a_patch() -> None:
    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=16, flash_attention=False)
    x = X.reshape(1, 4, 64)
    expected = layer(x, x, use_causal_mask=True)
    with tk.patch(strict=True):
        text = str(jax.make_jaxpr(lambda x: layer(x, x, use_causal_mask=True))(x))
        np.testing.assert_allclose(layer(x, x, use_causal_mask=True), expected, rtol=1e-4, atol=1e-5)
    assert "tilekern_call" in text
