"""Logits in portions: functions of some tokens at a time, and gradients of some words of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import tiled
from tilekern.kernels.cross_entropy.backward import cross_entropy_backward_hidden
from tilekern.kernels.matmul import matmul

Pair = tuple[Any, Any]

# Logits of a portion of tokens.
_PORTION, _MOST_TOKENS = 1 << 22, 128


def by_tokens(function: Callable[..., Any], arrays: tuple[jax.Array, ...], vocabulary: int) -> Any:
    """A function of arrays [T, ...] with results [T], in portions of at most 128 tokens and 2²² logits.

    Each portion keeps only its inputs for the backward pass (`jax.checkpoint`).
    """
    tokens = arrays[0].shape[0]
    size = max(1, min(tokens, _MOST_TOKENS, _PORTION // max(1, vocabulary)))
    count = tk.cdiv(tokens, size)

    def cut(x: jax.Array) -> jax.Array:
        padding = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])

    @jax.checkpoint
    def portion(some: tuple[jax.Array, ...]) -> Any:
        return function(*some)

    found = cast(Any, jax.lax.map(portion, tuple(map(cut, arrays))))

    def whole(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[:tokens]

    return jax.tree.map(whole, found)


def gradients_by_words(
    hidden: jax.Array,
    weight: jax.Array,
    of_logits: Callable[[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]], jax.Array],
    *,
    needs: tuple[bool, bool],
    words: int,
) -> Pair:
    """The cotangents of hidden[T, D] and weight[D, V] from those of the logits hidden @ weight.

    Args:
      hidden: the tokens.
      weight: the words.
      of_logits: `of_logits(first, done, some)` returns the cotangents [T, W] of the logits of W words from number
        `first`; 0 for those before number `done` of these. `some(x)` cuts the W columns of these words out of x[R, V].
      needs: which of both; the other one is None.
      words: the number W.
    """
    (tokens, width), vocabulary = hidden.shape, weight.shape[1]
    wide = tk.accumulator(hidden.dtype)
    dhidden = jnp.zeros(hidden.shape, wide) if needs[0] else None
    dweight = jnp.zeros(weight.shape, weight.dtype) if needs[1] else None
    if not tokens * width * vocabulary:
        return None if dhidden is None else dhidden.astype(hidden.dtype), dweight
    words = min(words, vocabulary)
    count = tk.cdiv(vocabulary, words)

    def step(number: Any, carry: Pair) -> Pair:
        # Each step has as many words. The first one is that of the last words, and leaves those before them out.
        dhidden, dweight = carry
        number = jnp.asarray(number, jnp.int32)
        first = jnp.where(number == 0, vocabulary - words, (number - 1) * words)
        done = jnp.where(number == 0, count * words - vocabulary, 0)

        def some(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, first, words, axis=1)

        dlogits = of_logits(first, done, some)
        if dhidden is not None:
            dhidden = cross_entropy_backward_hidden(dhidden, dlogits, some(weight))
        if dweight is not None:
            found = matmul(hidden, dlogits, transpose_x=True)
            dweight = jax.lax.dynamic_update_slice_in_dim(dweight, found, first, axis=1)
        return dhidden, dweight

    dhidden, dweight = cast(Pair, jax.lax.fori_loop(0, count, step, (dhidden, dweight)))
    return None if dhidden is None else dhidden.astype(hidden.dtype), dweight


def words_at_a_time(hidden: Any, weight: Any) -> int:
    """∂s of 32 MiB, but of 256 words at least, for products with it to be large ones.

    Its rows start at multiples of 128 elements for any vocabulary of at least as many words: GPUs copy these best.
    """
    vocabulary = weight.shape[1]
    most = max(128, vocabulary // 128 * 128)
    return tiled(vocabulary, min(most, _fitting(32 << 20, hidden)), 128)


def words_at_a_time_on_cpus(hidden: Any, weight: Any) -> int:
    """∂s of 8 MiB, which stays in the cache that all cores share."""
    return tiled(weight.shape[1], _fitting(8 << 20, hidden), 128)


def _fitting(nbytes: int, hidden: Any) -> int:
    """Words of which ∂s has at most so many bytes."""
    return max(256, nbytes // max(1, hidden.shape[0] * hidden.dtype.itemsize) // 128 * 128)
