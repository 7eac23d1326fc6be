"""The arguments of the public functions, checked and brought to one form."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_int32, as_real, is_float, is_integer, refusal, require
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.fixed_point import UNIT, log2

hide_frames(__file__)

WORDS = 1 << 19
"""The largest vocabulary: the weights of so many tokens have a sum of 48 bits."""


def logits_of_rows(function: str, logits: Any) -> None:
    """Raise an `ArgumentError` unless the logits are floats [*B, V] of a vocabulary that sums of weights hold."""
    require(
        is_float(logits) and logits.ndim > 0 and 0 < logits.shape[-1] <= WORDS,
        function,
        expected=f"logits[*B, V] of a float dtype of at least 16 bits, V from 1 to {WORDS}",
        fix="cast with .astype; the last dim is the vocabulary",
        logits=logits,
    )


def keys_of_rows(function: str, key: Any, batch: tuple[int, ...]) -> jax.Array:
    """uint32[*batch, 2]: two random words for each row, of its own key or split from one key.

    Raises:
      ArgumentError: it is no key, nor one for each row.
    """
    data: Any = key
    if getattr(key, "dtype", None) == jnp.uint32 and key.ndim > 0 and key.shape[-1] == 2:
        data = jax.random.wrap_key_data(key, impl="threefry2x32")
    is_key = hasattr(data, "dtype") and jnp.issubdtype(data.dtype, jax.dtypes.prng_key)
    if not is_key or data.shape not in ((), batch):
        expected = f"a key of jax.random, or its data, uint32[2]; or keys of shape {list(batch)}, one for each row"
        raise refusal(function, "key", expected, key, "make it with jax.random.key(seed)")
    keys = data if data.shape == batch else jax.random.split(data, batch)

    def words_of(one: jax.Array) -> jax.Array:
        return jax.random.bits(one, (2,), jnp.uint32)

    words = jax.vmap(words_of)(keys.reshape(math.prod(batch)))
    return words.reshape(*batch, 2)


def drafts_of_rows(function: str, logits: Any, draft_tokens: Any, draft_logits: Any, draft_lens: Any) -> None:
    """Raise an `ArgumentError` unless the arrays of drafts fit logits [B, K + 1, V]."""
    fits = logits.ndim == 3 and is_integer(draft_tokens)
    fits = fits and draft_tokens.shape == (logits.shape[0], logits.shape[1] - 1)
    optional = {"draft_logits": draft_logits, "draft_lens": draft_lens}
    if fits and draft_logits is not None:
        fits = is_float(draft_logits) and draft_logits.shape == (*draft_tokens.shape, logits.shape[2])
    if draft_lens is not None:
        fits = fits and is_integer(draft_lens) and draft_lens.shape == logits.shape[:1]
    require(
        fits,
        function,
        expected="logits[B, K + 1, V], integers draft_tokens[B, K], draft_logits[B, K, V] and integers draft_lens[B]",
        fix="logits have a row behind the last token and behind each draft",
        logits=logits,
        draft_tokens=draft_tokens,
        **{name: array for name, array in optional.items() if array is not None},
    )


def parents_of_rows(function: str, parents: Any, draft_tokens: Any) -> None:
    """Raise an `ArgumentError` unless the parents are integers [N] or [B, N], and NumPy's stand in order."""
    nodes = int(draft_tokens.shape[1])
    fits = is_integer(parents) and parents.shape in (draft_tokens.shape, (nodes,))
    if fits and isinstance(parents, np.ndarray):
        fits = bool(np.all((parents >= -1) & (parents < np.arange(nodes))))
    if not fits:
        expected = f"integers {[nodes]} or {list(draft_tokens.shape)}, each from -1 to its place - 1"
        raise refusal(
            function, "parents", expected, parents, "number the nodes so that a parent stands before its children"
        )


def rates_of_rows(
    function: str, batch: tuple[int, ...], vocabulary: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> Rates:
    """The rates as integers and float32, of shape [prod(batch)].

    Raises:
      ArgumentError: a number is out of its range, or an array has another shape.
    """
    heat = _floats(function, "temperature", temperature, batch, 0, math.inf, "0 draws the most likely token")
    # A temperature below 0, or NaN, stands for 0.
    scale = jnp.float32(2.0**UNIT * math.log2(math.e)) / jnp.where(heat > 0, heat, jnp.float32(0))
    most = None if top_k is None else _counts(function, top_k, batch)
    share = None if top_p is None else _floats(function, "top_p", top_p, batch, 0, 1, "1, or None, keeps all tokens")
    least = None if min_p is None else _floats(function, "min_p", min_p, batch, 0, 1, "0, or None, keeps all tokens")
    return Rates(
        scale,
        None if most is None else jnp.where(most > 0, most, jnp.int32(vocabulary)),
        None if share is None else jnp.round(jnp.clip(share, 0, 1) * 2**16).astype(jnp.uint32),
        None if least is None else _logarithms(jnp.clip(least, 0, 1)),
    )


def _logarithms(probabilities: jax.Array) -> jax.Array:
    """log2 of numbers up to 1 in units of 2^-20; of 0 the least exponent."""
    numbers = (probabilities * 2.0**31).astype(jnp.uint32)
    return jnp.where(numbers > 0, log2(jnp.maximum(numbers, 1)) - (31 << UNIT), -(1 << 30))


def penalties_of_rows(
    function: str, batch: tuple[int, ...], vocabulary: int, counts: Any, repetition: Any, presence: Any, frequency: Any
) -> Penalties | None:
    """The penalties of rows [prod(batch)]; None without counts.

    Raises:
      ArgumentError: a number is out of its range, an array has another shape, or the counts are missing.
    """
    named = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    given = [name for name, value in named.items() if value is not None]
    shape = (*batch, vocabulary)
    if counts is None and not given:
        return None
    if counts is None or not (is_integer(counts) and counts.shape == shape and given):
        raise ArgumentError(
            f"{function} cannot apply these penalties",
            expected=f"counts of integers {list(shape)}, and {', '.join(named)} or some of them",
            got=f"counts = {describe(counts)}, with {', '.join(given) or 'no penalty'}",
            fix="counts is how often each token occurred; leave all of them out for no penalty",
        )
    any_number = -math.inf, math.inf
    factor = None if repetition is None else _floats(function, given[0], repetition, batch, 2.0**-100, 2.0**100, "1")
    once = None if presence is None else _floats(function, "presence_penalty", presence, batch, *any_number, "0")
    each = None if frequency is None else _floats(function, "frequency_penalty", frequency, batch, *any_number, "0")
    return Penalties(
        as_int32(counts).reshape(-1, vocabulary),
        None if factor is None else jnp.stack([factor, 1 / factor], axis=-1),
        once,
        None if each is None else _halves(each),
    )


def _halves(numbers: jax.Array) -> jax.Array:
    """[R, 2]: the upper 12 bits of each float32's significand, and the rest, whose products with 12 bits are exact."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32) & jnp.uint32(0xFFFFF000)
    upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.stack([upper, numbers - upper], axis=-1)


def _floats(
    function: str, name: str, value: Any, batch: tuple[int, ...], least: float, most: float, neutral: str
) -> jax.Array:
    """float32[prod(batch)] of a number in a range, or of an array with a number for each row."""
    number, rows, array = as_real(value), math.prod(batch), value
    if number is not None and not isinstance(value, bool) and least <= number <= most:
        return jnp.full(rows, number, jnp.float32)
    if hasattr(array, "dtype") and array.dtype != bool and array.shape in ((), batch):
        return jnp.broadcast_to(jnp.asarray(array).astype(jnp.float32), batch).reshape(rows)
    expected = f"a number from {least:g} to {most:g}, or an array {list(batch)} of such numbers"
    raise refusal(function, name, expected, value, f"the neutral number is {neutral}" if len(neutral) == 1 else neutral)


def _counts(function: str, value: Any, batch: tuple[int, ...]) -> jax.Array:
    """int32[prod(batch)] of an int, or of an array with an integer for each row."""
    rows, array = math.prod(batch), value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return jnp.full(rows, value, jnp.int32)
    if is_integer(array) and array.shape in ((), batch):
        return jnp.broadcast_to(as_int32(array), batch).reshape(rows)
    expected = f"an int from 0, or an array {list(batch)} of integers"
    raise refusal(function, "top_k", expected, value, "0, or None, keeps all tokens")
