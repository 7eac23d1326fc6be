"""The definition of sampling in floats, in plain jnp: sorted probabilities, and the largest Gumbel number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.sample.checks import keys_of_rows
from tilekern.kernels.softcap import softcapped


def reference(
    logits: jax.Array,
    key: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    counts: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    dtype: Any = None,
) -> jax.Array:
    """The tokens of `sample`, computed in `dtype`; None for float32, or float64 for float64 logits.

    Where two tokens have nearly equal scores, or a token is at the edge of those kept, the kernel may decide otherwise:
    it computes to 20 bits behind the point of log2.
    """
    batch, vocabulary = logits.shape[:-1], logits.shape[-1]
    wide = dtype or jnp.promote_types(logits.dtype, jnp.float32)

    def column(rate: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(rate, wide), batch)[..., None]

    x = jnp.where(jnp.isnan(logits), -jnp.inf, logits).astype(wide)
    if repetition_penalty is not None and counts is not None:
        factor = column(repetition_penalty)
        x = jnp.where(counts != 0, jnp.where(x > 0, x / factor, x * factor), x)
    for penalty, most in ((frequency_penalty, 4095), (presence_penalty, 1)):
        if penalty is not None and counts is not None:
            x = x - column(penalty) * jnp.clip(counts, 0, most)
    heat = column(temperature)
    best = x.max(axis=-1, keepdims=True)
    scores = jnp.where(x == best, 0, (x - best) / jnp.where(heat > 0, heat, 1))  # of equal infinities, too
    drawable = (x > -jnp.inf) | (best == -jnp.inf)
    if min_p is not None:
        drawable &= scores >= jnp.log(column(min_p))
    if top_k is not None:
        most = jnp.where(column(top_k) > 0, jnp.minimum(column(top_k), vocabulary), vocabulary).astype(int)
        ranked = -jnp.sort(-jnp.where(drawable, scores, -jnp.inf), axis=-1)
        drawable &= scores >= jnp.take_along_axis(ranked, most - 1, axis=-1)
    if top_p is not None:
        share = jnp.round(column(top_p) * 2**16) / 2**16
        weights = jnp.where(drawable, jnp.exp(scores), 0)
        ranked = -jnp.sort(-weights, axis=-1)
        before = jnp.cumsum(ranked, axis=-1) - ranked
        enough = (before < share * weights.sum(axis=-1, keepdims=True)) & (ranked > 0)
        least = jnp.min(jnp.where(enough, ranked, jnp.inf), axis=-1, keepdims=True)
        drawable &= (weights >= jnp.minimum(least, ranked[..., :1])) | (share >= 1)
    words = keys_of_rows("sample", key, batch).reshape(-1, 2)

    def bits_of(word: jax.Array) -> jax.Array:
        return tk.random_bits(word, jnp.arange(vocabulary, dtype=jnp.uint32))

    bits = jax.vmap(bits_of)(words)
    v = (bits | 1).astype(wide) * 2.0**-32
    drawn = scores - jnp.log(-jnp.log1p(-v)).reshape(logits.shape)
    return jnp.argmax(jnp.where(drawable, jnp.where(heat > 0, drawn, x), -jnp.inf), axis=-1).astype(jnp.int32)


def hidden_reference(
    hidden: jax.Array,
    weight: jax.Array | QuantizedArray,
    key: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose_weight: bool = False,
    softcap: float | None = None,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    counts: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    dtype: Any = None,
) -> jax.Array:
    """The tokens of `sample_hidden`: `reference` of the logits, computed in `dtype` as `reference` is."""
    wide = dtype or jnp.promote_types(hidden.dtype, jnp.float32)
    dense = weight.dequantize(wide) if isinstance(weight, QuantizedArray) else weight
    words = dense.T if transpose_weight else dense
    logits = jnp.matmul(hidden.astype(wide), words.astype(wide), precision=jax.lax.Precision.HIGHEST)
    logits = softcapped(logits if bias is None else logits + bias.astype(wide), softcap)
    return reference(
        logits,
        key,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        counts=counts,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        dtype=wide,
    )
