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


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def product(x, w, out, *, block: tk.Block = 32):
    i, j = tk.parallel(x.shape[0], block), tk.parallel(w.shape[1], block)
    out[i, j] = jax.numpy.tanh(x[i, :] @ w[:, j])


class Product(keras.layers.Layer):
    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.w = self.add_weight(shape=(input_shape[-1], 5))

    def call(self, x: jax.Array) -> jax.Array:
        return product(x, self.w)


def test_a_layer_of_a_kernel_takes_a_batch_of_unknown_size() -> None:
    """Keras traces the layer for a `KerasTensor` of shape (None, 64), and trains it in batches of 3, 3 and 1."""
    inputs = keras.Input((64,))
    outputs = Product()(inputs)
    assert outputs.shape == (None, 5)
    model = keras.Model(inputs, outputs)
    np.testing.assert_array_equal(model(X), product(X, model.weights[0].value))
    model.compile("sgd", "mse")
    history = model.fit(np.tile(X, (2, 1))[:7], np.zeros((7, 5), np.float32), batch_size=3, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
