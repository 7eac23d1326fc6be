"""Shared parts of chunked linear recurrences: weights of decays within a chunk, and checks of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.authoring import hide_frames
from tilekern.kernels.checks import is_float, is_integer, require

hide_frames(__file__)


# The least log decays of float32 and float64: their exponentials are 0.
_LEAST, _LEAST_WIDE = -110, -750


class Decays(NamedTuple):
    """Products of decays within a chunk of C tokens; 0 from one packed sequence to another.

    Attributes:
      between: [C, C], over the tokens after column j up to row i; 0 where i < j.
      before: [C], over the tokens up to i: the weight of the state before the chunk.
      after: [C], over the tokens after i: the weight of token i in the state after the chunk.
      whole: over all tokens: the weight of the state before the chunk in the state after the chunk.
    """

    between: jax.Array
    before: jax.Array
    after: jax.Array
    whole: jax.Array


def decays_of(t: tk.Tile, log_decays: jax.Array, segment_ids: Any, b: Any, *, by_products: bool = False) -> Decays:
    """The products of decays in chunk t of the tokens; `segment_ids` is the ref, b the sequence.

    Products are exponentials of sums of log decays. No log decay is positive, so nothing overflows. With `by_products`
    the sums between tokens come from a product of matrices, not from differences.
    """
    log_decays = bounded(t, log_decays, segment_ids, b)
    sums, before, after, whole = (_summed if by_products else _subtracted)(t, log_decays)
    related = t.indices[:, None] >= t.indices[None, :]
    return Decays(jnp.exp(jnp.where(related, sums, -jnp.inf)), jnp.exp(before), jnp.exp(after), jnp.exp(whole))


def bounded(t: tk.Tile, log_decays: jax.Array, segment_ids: Any, b: Any, axis: int = 0) -> jax.Array:
    """The log decays of chunk t, at least the value of a decay of 0, and this value where a packed sequence begins.

    A state that is multiplied by 0 begins anew: the weight of an earlier token is the exponential of a sum with such a
    term, 0. So ids of sequences are compared only with ids of neighbours, and an id may come again. Tokens are along
    `axis`; `segment_ids` is the ref, b the sequence.
    """
    least = _LEAST_WIDE if log_decays.dtype == jnp.float64 else _LEAST
    log_decays = jnp.maximum(log_decays, least)
    begins = begins_new_sequence(t, segment_ids, b)
    if begins is None:
        return log_decays
    other_axes = [d for d in range(log_decays.ndim) if d != axis]
    return jnp.where(jnp.expand_dims(begins, other_axes), least, log_decays)


def _subtracted(t: tk.Tile, log_decays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The logarithms of `Decays`, for i >= j.

    Multiples of a step add up without rounding, and the remainders are small: in chunks of up to 297 tokens a
    difference of sums is exact to 1e-8 beside its own rounding, however large the sums are.
    """
    step = _step(log_decays.shape[0], log_decays.dtype)
    coarse = jnp.round(log_decays / step) * step
    parts = coarse, log_decays - coarse
    sums, totals = [jnp.cumsum(x) for x in parts], [x.sum() for x in parts]
    after = (totals[0] - sums[0]) + (totals[1] - sums[1])
    differences = [x[:, None] - x[None, :] for x in sums]
    return differences[0] + differences[1], sums[0] + sums[1], after, totals[0] + totals[1]


def _step(tokens: int, dtype: Any) -> float:
    """The power of two to whose multiples log decays are rounded: sums of `tokens` multiples are exact in float32.

    A sum is at most 2^24 times the power.
    """
    return 2.0**-9 if dtype == jnp.float64 else 2.0 ** max(-9, math.ceil(math.log2(-_LEAST * tokens)) - 24)


def _summed(t: tk.Tile, log_decays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`_subtracted` by Σ_t [t <= i] d_t [t > j], the product of a matrix of log decays and a matrix of zeros and ones.

    No term is lost to a larger sum. On TPUs this takes less time than to turn rows of sums into columns.
    """
    row, column = t.indices[:, None], t.indices[None, :]
    up_to, beyond = (jnp.where(m, log_decays[None, :], 0) for m in (column <= row, column > row))
    return _sums_between(log_decays[None])[0], up_to.sum(axis=1), beyond.sum(axis=1), log_decays.sum()


def decays_of_heads(t: tk.Tile, log_decays: jax.Array, segment_ids: Any, b: Any) -> Decays:
    """`decays_of` for the log decays [H, C] of heads: between [H, C, C], before and after [H, C], whole [H, 1]."""
    log_decays = bounded(t, log_decays, segment_ids, b, axis=1)
    row, column = t.indices[:, None], t.indices[None, :]
    up_to, beyond = (jnp.where(m, 1, 0).astype(log_decays.dtype) for m in (row <= column, row > column))
    before, after = (tk.dot(log_decays, m, precision="bf16x6") for m in (up_to, beyond))
    before, after, whole = jnp.exp(before), jnp.exp(after), jnp.exp(log_decays.sum(axis=1, keepdims=True))
    sums = _sums_between(log_decays)
    return Decays(jnp.exp(jnp.where(row >= column, sums, -jnp.inf)), before, after, whole)


@jax.custom_jvp
def _sums_between(x: jax.Array) -> jax.Array:
    """Σ_t [t <= i] x_t [t > j], [H, C, C], of x[H, C]; float32 is three parts of bfloat16, whose products are exact."""
    if x.dtype != jnp.float32:
        return _sums_of([x], None)
    return _sums_of(parts_of(x), "bf16")


@_sums_between.defjvp
def _jvp_of_sums(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The sum is linear. Parts of bfloat16 would round the cotangents of a backward pass."""
    return _sums_between(*primals), _sums_of(tangents, "bf16x6")


def _sums_of(parts: Sequence[jax.Array], precision: str | None) -> jax.Array:
    """Σ of `_sums_between` over the parts, [H, C, C], by one product for all heads."""
    size, dtype = parts[0].shape[1], parts[0].dtype
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), d) for d in (0, 1))
    up_to = jnp.concatenate([column <= row] * len(parts), axis=1)
    later = jnp.concatenate([jnp.where(row > column, 1, 0).astype(dtype)] * len(parts))
    terms = jnp.where(up_to, jnp.concatenate(parts, axis=1)[:, None, :], 0)
    heads, rows, terms_of_row = terms.shape
    sums = tk.dot(terms.reshape(heads * rows, terms_of_row), later, precision=precision)
    return sums.reshape(heads, rows, size)


def truncated(x: jax.Array) -> jax.Array:
    """The bfloat16 next to zero from x, as float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def parts_of(x: jax.Array) -> list[jax.Array]:
    """Three parts of bfloat16, as float32, whose sum is x."""
    high = truncated(x)
    middle = truncated(x - high)
    return [high, middle, x - high - middle]


def columns_of(x: jax.Array, width: int) -> jax.Array:
    """The columns of x[C, H], each repeated: [H, C, width].

    A TPU repeats a lane of a tile in place. A tile of one lane would be shifted first.
    """
    return jnp.stack([jnp.broadcast_to(x[:, n : n + 1], (x.shape[0], width)) for n in range(x.shape[1])])


def as_runs(segment_ids: Any) -> Any:
    """int32[B, T] whose neighbours differ where neighbours in `segment_ids`, any integers, differ; None for None.

    Integers of 64 bits become numbers of runs: [5, 5, 9, 5] -> [0, 0, 1, 2]. NumPy counts the runs of NumPy's arrays:
    without 64-bit types JAX would cut off upper bits.
    """
    if segment_ids is None:
        return None
    if segment_ids.dtype.itemsize <= 4:
        return segment_ids.astype(np.int32)
    library: Any = jnp if isinstance(segment_ids, jax.Array) else np
    changes = library.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return library.cumsum(changes, axis=1, dtype=np.int32)


def begins_new_sequence(t: tk.Tile, segment_ids: Any, b: Any) -> jax.Array | None:
    """bool[C]: True for tokens of chunk t whose id differs from the id of the token before; None without `segment_ids`.

    Example: the ids [5, 5, 9, 5] give [False, False, True, True]. Tokens past the end are False.

    Args:
      t: the chunk of tokens.
      segment_ids: the ref int[B, T], or None.
      b: the number of the sequence.
    """
    if segment_ids is None:
        return None
    return t.valid & (segment_ids[b, t] != segment_ids.load((b, t - 1), fill=segment_ids[b, 0]))


def continues(segment_ids: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """bool[B, T]: True for a token in the sequence of the token before; the first token continues the state."""
    if segment_ids is None:
        return jnp.ones(shape, bool)
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.concatenate([jnp.ones((shape[0], 1), bool), same], axis=1)


def check_tokens(
    function: str,
    query: Any,
    key: Any,
    value: Any,
    of_tokens: dict[str, Any],
    initial_state: Any,
    segment_ids: Any,
    *,
    constant: bool = False,
    by_channel: tuple[str, ...] = (),
) -> None:
    """Raise an `ArgumentError` unless the arrays fit.

    `of_tokens` are arrays [B, T, H], or with `constant` also [H]; names in `by_channel` also [B, T, H, K].
    """
    floats = {"query": query, "key": key, "value": value, **of_tokens, "initial_state": initial_state}
    named = {name: x for name, x in floats.items() if x is not None}
    fits = all(map(is_float, named.values())) and _shapes_fit(query, key, value, initial_state)
    for name, x in of_tokens.items():
        wide = name in by_channel and fits and x is not None and x.shape == (*value.shape[:3], query.shape[3])
        fits = fits and (wide or x is None or _of_tokens(x, value, constant))
    fits = fits and (segment_ids is None or (is_integer(segment_ids) and segment_ids.shape == value.shape[:2]))
    require(
        fits,
        function,
        expected="query[B, T, G, K], key[B, T, G, K] and value[B, T, H, V] of one float dtype of at least 16 bits, H a "
        f"multiple of G, {', '.join(f'{n}[B, T, H]' + ' or [B, T, H, K]' * (n in by_channel) for n in of_tokens)}"
        f"{' or [H]' if constant else ''}, "
        "initial_state[B, H, K, V] or None, of any such dtypes, segment_ids[B, T] of integers or None",
        fix="heads come after tokens: use swapaxes(1, 2); cast with .astype",
        **named,
        **({} if segment_ids is None else {"segment_ids": segment_ids}),
    )


def _shapes_fit(query: Any, key: Any, value: Any, initial_state: Any) -> bool:
    if not (query.ndim == value.ndim == 4 and query.dtype == key.dtype == value.dtype and query.shape == key.shape):
        return False
    (batch, tokens, groups, depth), (_, _, heads, width) = query.shape, value.shape
    shared = heads == 0 if groups == 0 else heads % groups == 0
    state_fits = initial_state is None or initial_state.shape == (batch, heads, depth, width)
    return shared and state_fits and value.shape[:2] == (batch, tokens)


def _of_tokens(x: Any, value: Any, constant: bool) -> bool:
    return x.shape == value.shape[:3] or (constant and x.shape == value.shape[2:3])
