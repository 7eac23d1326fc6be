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
    """The results [T] of a function of arrays [T, ...], computed in portions of at most 128 tokens and 2²² logits.

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

    results = cast(Any, jax.lax.map(portion, tuple(map(cut, arrays))))

    def whole(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[:tokens]

    return jax.tree.map(whole, results)


def gradients_by_words(
    hidden: jax.Array,
    weight: jax.Array,
    of_logits: Callable[[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]], jax.Array],
    *,
    needs: tuple[bool, bool],
    words: int,
) -> Pair:
    """The cotangents of hidden[T, D] and weight[D, V] from the cotangents of the logits hidden @ weight.

    Args:
      hidden: the tokens.
      weight: the words.
      of_logits: `of_logits(first, done, some)` returns the cotangents [T, W] of the logits of W words from number
        `first`, with zeros for the first `done` words. `some(x)` cuts the W columns of the words out of x[R, V].
      needs: a flag for hidden and for weight; the cotangent is None if False.
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
        # All steps have W words. Step 0 takes the last W words; `done` leaves out the words of other steps among them.
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
            columns = matmul(hidden, dlogits, transpose_lhs=True)
            dweight = jax.lax.dynamic_update_slice_in_dim(dweight, columns, first, axis=1)
        return dhidden, dweight

    dhidden, dweight = cast(Pair, jax.lax.fori_loop(0, count, step, (dhidden, dweight)))
    return None if dhidden is None else dhidden.astype(hidden.dtype), dweight


def words_at_a_time(hidden: Any, weight: Any) -> int:
    """The words whose ∂s takes 32 MiB, but at least 256, so that products with ∂s are large.

    Rows of ∂s start at multiples of 128 elements for any vocabulary of at least 128 words: GPUs copy such rows best.
    """
    vocabulary = weight.shape[1]
    most = max(128, vocabulary // 128 * 128)
    return tiled(vocabulary, min(most, _fitting(32 << 20, hidden)), 128)


def words_at_a_time_on_cpus(hidden: Any, weight: Any) -> int:
    """The words whose ∂s takes 8 MiB and stays in the cache that all cores share."""
    return tiled(weight.shape[1], _fitting(8 << 20, hidden), 128)


def _fitting(nbytes: int, hidden: Any) -> int:
    """The number of words whose ∂s takes at most `nbytes`, a multiple of 128, at least 256."""
    return max(256, nbytes // max(1, hidden.shape[0] * hidden.dtype.itemsize) // 128 * 128)
