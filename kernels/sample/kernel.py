"""The kernels: a program for each row of logits, and their blocks.

Whether a token is kept, and which one is drawn, is decided in integers, so that no backend and no block changes it.
A logit becomes an int32 in the same order, its key; its distance from the largest logit becomes log2 of its
probability beside that of the most likely token, in units of 2^-20; its weight is 2^29 times that probability.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, tiled
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.fixed_point import LOWEST, from_ordered, gumbel, power
from tilekern.kernels.sample.row import LEAST, Row, largest, with_candidates

EXPONENT = -float(2**30)
"""The least log2 of a probability in units of 2^-20: 2^-1024. Less likely tokens count as so likely."""


class Sums(NamedTuple):
    """The sum of weights, as 2^16 upper + lower; both uint32, lower < 2^16."""

    upper: jax.Array
    lower: jax.Array

    def plus(self, weights: jax.Array) -> Sums:
        """The sum with more weights, up to 2^16 of them."""
        lower = self.lower + (weights & jnp.uint32(0xFFFF)).sum(dtype=jnp.uint32)
        upper = self.upper + (weights >> 16).sum(dtype=jnp.uint32) + (lower >> 16)
        return Sums(upper, lower & jnp.uint32(0xFFFF))

    def reaches(self, other: Sums) -> jax.Array:
        """True if the sum is at least the other one."""
        return (self.upper > other.upper) | ((self.upper == other.upper) & (self.lower >= other.lower))

    def share(self, part: jax.Array) -> Sums:
        """part / 2^16 of the sum, rounded down, at least 1; part < 2^16, as uint32."""
        mask = jnp.uint32(0xFFFF)
        middle = (self.upper & mask) * part
        lower = (self.lower * part >> 16) + (middle & mask)
        upper = (self.upper >> 16) * part + (middle >> 16) + (lower >> 16)
        lower = lower & mask
        return Sums(upper, jnp.where((upper | lower) == 0, jnp.uint32(1), lower))


class Kept(NamedTuple):
    """Which tokens of a row may be drawn.

    Attributes:
      rates: of the row, scalars.
      best: the key of the largest logit.
      least: the key of the least likely token that is kept by `top_k`, `top_p` and its own probability.
    """

    rates: Rates
    best: jax.Array
    least: jax.Array

    def exponents(self, keys: jax.Array) -> jax.Array:
        """int32: log2 of the probability of tokens beside that of the most likely one, in units of 2^-20."""
        distance = (from_ordered(keys) - from_ordered(self.best)) * self.rates.scale
        # Infinities: inf - inf and 0 inf are NaN.
        distance = jnp.where(distance > EXPONENT, distance, EXPONENT).astype(jnp.int32)
        return jnp.where(keys == self.best, 0, distance)

    def __call__(self, keys: jax.Array, exponents: jax.Array) -> jax.Array:
        """True for each token that is kept."""
        kept = keys >= self.least
        return kept if self.rates.min_p is None else kept & (exponents >= self.rates.min_p)


def kept_tokens(row: Row, rates: Rates) -> Kept:
    """The tokens of a row that are kept: of `min_p`, then of those by `top_k`, and of those by `top_p`."""
    best = row.reduce(lambda tokens, keys, most: jnp.maximum(most, keys.max()), jnp.int32(LEAST))
    # Tokens of -inf are not drawn unless all are.
    kept = Kept(rates, best, jnp.minimum(best, LOWEST + 1))
    if rates.top_k is not None:
        kept = kept._replace(least=_top_k(row, kept))
    if rates.top_p is not None:
        kept = kept._replace(least=_top_p(row, kept))
    return kept


def _top_k(row: Row, kept: Kept) -> jax.Array:
    """The key of the k-th token of those kept; that of the last one if there are fewer."""

    def reaches(least: jax.Array) -> jax.Array:
        def count(tokens: jax.Array, keys: jax.Array, total: jax.Array) -> jax.Array:
            counts = kept(keys, kept.exponents(keys)) & (keys >= least)
            return total + counts.sum(dtype=jnp.int32)

        return row.reduce(count, jnp.int32(0)) >= kept.rates.top_k

    return jnp.maximum(kept.least, largest(reaches))


def _top_p(row: Row, kept: Kept) -> jax.Array:
    """The key up to which the tokens kept have `top_p` of the probability: those with larger keys have less."""

    def total(least: jax.Array) -> Sums:
        def add(tokens: jax.Array, keys: jax.Array, sums: Sums) -> Sums:
            exponents = kept.exponents(keys)
            counts = kept(keys, exponents) & (keys >= least)
            return sums.plus(jnp.where(counts, power(exponents), jnp.uint32(0)))

        return row.reduce(add, Sums(jnp.uint32(0), jnp.uint32(0)))

    goal = total(kept.least).share(kept.rates.top_p)
    least_key = jnp.maximum(kept.least, largest(lambda least: total(least).reaches(goal)))
    return jnp.where(kept.rates.top_p >= 1 << 16, kept.least, least_key)


def _row(logits: Any, rates: Rates, penalties: Penalties | None, block_v: int) -> tuple[Row, Rates]:
    """The row of a program, and its rates."""
    r = tk.parallel(logits.shape[0])
    row = Row(logits, penalties, r, tk.serial(logits.shape[1], block_v))
    of_row = Rates(*(None if rate is None else rate[r] for rate in rates))
    return (row if of_row.top_k is None else with_candidates(row, of_row.top_k, block_v)), of_row


def _tokens(logits: Any, *unused: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)


@tk.kernel(out_type=_tokens)
def sampled_tokens(
    logits: tk.Ref,
    keys: tk.Ref,
    rates: Rates,
    penalties: Penalties | None,
    tokens: tk.Ref,
    *,
    block_v: tk.Block = 1024,
) -> None:
    """logits[B, V], V > 0, keys uint32[B, 2] -> tokens int32[B], one that is drawn for each row.

    The token with the largest sum of log2 of its probability and a number of the Gumbel distribution is a draw from
    the probabilities (Gumbel 1954; Maddison et al. 2014, https://arxiv.org/abs/1411.0030). The bits of token v are a
    function of the row's key and of v. Greedy rows draw the largest logit; of equal ones the first.
    """
    row, of_row = _row(logits, rates, penalties, block_v)
    kept = kept_tokens(row, of_row)
    key_data = keys[row.number]
    is_greedy = of_row.scale == jnp.inf

    def step(numbers: jax.Array, keys: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        score, token = best
        exponents = kept.exponents(keys)
        drawn = exponents + gumbel(tk.random_bits(key_data, numbers))
        scores = jnp.where(kept(keys, exponents), jnp.where(is_greedy, keys, drawn), LEAST)
        most = scores.max()
        first = jnp.where(scores == most, numbers, _NO_TOKEN).min()
        # Candidates are in no order, so of equal scores the least number is taken.
        first = jnp.where(most == score, jnp.minimum(token, first), first)
        return jnp.maximum(score, most), jnp.where(most >= score, first, token)

    _, tokens[row.number] = row.reduce(step, (jnp.int32(LEAST), jnp.int32(_NO_TOKEN)))


def _like_logits(logits: Any, *unused: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape, jnp.float32)


@tk.kernel(out_type=_like_logits)
def kept_logits(
    logits: tk.Ref, rates: Rates, penalties: Penalties | None, out: tk.Ref, *, block_v: tk.Block = 1024
) -> None:
    """logits[B, V], V > 0 -> float32[B, V]: the logarithm of probabilities up to a constant, -inf of tokens not kept.

    They are differences from the largest logit, divided by the temperature; greedy rows keep the first of the largest.
    """
    row, of_row = _row(logits, rates, penalties, block_v)
    kept = kept_tokens(row, of_row)
    is_greedy = of_row.scale == jnp.inf

    def first(numbers: jax.Array, keys: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.minimum(token, jnp.where(keys == kept.best, numbers, _NO_TOKEN).min())

    token = row.reduce(first, jnp.int32(_NO_TOKEN))

    def write(j: tk.Tile) -> None:
        keys = row.keys(j)
        exponents = kept.exponents(keys)
        keeps = jnp.where(is_greedy, j.indices == token, kept(keys, exponents))
        logarithms = exponents.astype(jnp.float32) * jnp.float32(_LN_2)
        out[row.number, j] = jnp.where(keeps, logarithms, -jnp.inf)

    tk.foreach(tk.serial(logits.shape[1], block_v), write)


_NO_TOKEN = 2**31 - 1

_LN_2 = 0.6931471805599453 * 2.0**-20


@sampled_tokens.schedule("cpu")
@kept_logits.schedule("cpu")
def _cpu(logits: Any, *unused: Any) -> dict[str, int]:
    """A tile in the first-level cache."""
    return {"block_v": min(logits.shape[1], 4096)}


@sampled_tokens.schedule("cuda")
@kept_logits.schedule("cuda")
def _cuda(logits: Any, *others: Any) -> dict[str, int]:
    """A fourth of a tile with `top_k`, whose candidates lie in registers."""
    has_top_k = any(isinstance(other, Rates) and other.top_k is not None for other in others)
    return {"block_v": power_of_two(logits.shape[1], 1024 if has_top_k else 4096), "num_warps": 16 if has_top_k else 8}


@sampled_tokens.schedule("tpu")
@kept_logits.schedule("tpu")
def _tpu(logits: Any, *unused: Any) -> dict[str, int]:
    return {"block_v": tiled(logits.shape[1], 1 << 15, 1024)}
