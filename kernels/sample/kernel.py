"""The kernels: a program for each row of logits, and their blocks.

Whether a token is kept, and which one is drawn, is decided in integers, so that no backend and no block changes it.
A logit becomes an int32 in the same order, its key; its distance from the largest logit becomes log2 of its
probability beside that of the most likely token, in units of 2^-20; its weight is 2^29 times that probability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, tiled
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.fixed_point import LOWEST, from_ordered, gumbel, power
from tilekern.kernels.sample.row import LEAST, Row, candidates, largest, narrowed

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


_RANKS_OF_TOP_K = 2
"""The largest keys of a lane that are candidates: of 64 tokens in 1024 lanes, three share a lane in 4% of all rows."""
_RANKS_OF_TOP_P = 4
"""More, as `top_p` may keep hundreds of tokens: of 200 in 1024 lanes, five share a lane in 0.2% of all rows."""


def kept_tokens(row: Row, rates: Rates, block_v: int) -> tuple[Row, Kept]:
    """The tokens of a row that are kept, of `min_p`, then of those by `top_k`, and of those by `top_p`; and the row.

    `reduce` of the row visits few tokens, all that are kept among them, where one pass over the row can tell them.
    """
    few, dropped = row, jnp.int32(LEAST)
    if rates.top_k is not None or rates.top_p is not None:
        few, dropped = candidates(row, _RANKS_OF_TOP_P if rates.top_k is None else _RANKS_OF_TOP_K, block_v)
    best = few.reduce(lambda tokens, keys, most: jnp.maximum(most, keys.max()), jnp.int32(LEAST))
    # Tokens of -inf are not drawn unless all are.
    kept = Kept(rates, best, jnp.minimum(best, LOWEST + 1))
    if rates.top_k is not None:
        # The k-th largest candidate is at most the k-th largest key of the row.
        least = jnp.maximum(largest(lambda least: _count(few, least) >= rates.top_k), LEAST + 1)
        row = narrowed(row, few, least, dropped < least, block_v)
        kept = kept._replace(least=_top_k(row, kept))
        return row, kept if rates.top_p is None else kept._replace(least=_top_p(row, kept))
    return (row, kept) if rates.top_p is None else _top_p_alone(row, few, dropped, kept, block_v)


def _count(row: Row, least: jax.Array, counts: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """int32: how many keys are at least `least`, of those for which counts(keys) holds."""

    def count(tokens: jax.Array, keys: jax.Array, total: jax.Array) -> jax.Array:
        is_counted = keys >= least if counts is None else counts(keys) & (keys >= least)
        return total + is_counted.sum(dtype=jnp.int32)

    return row.reduce(count, jnp.int32(0))


def _top_k(row: Row, kept: Kept) -> jax.Array:
    """The key of the k-th token of those kept; that of the last one if there are fewer."""

    def is_kept(keys: jax.Array) -> jax.Array:
        return kept(keys, kept.exponents(keys))

    def reaches(least: jax.Array) -> jax.Array:
        return _count(row, least, is_kept) >= kept.rates.top_k

    return jnp.maximum(kept.least, largest(reaches))


def _total(row: Row, kept: Kept, least: jax.Array) -> Sums:
    """The sum of the weights of the tokens kept whose keys are at least `least`."""

    def add(tokens: jax.Array, keys: jax.Array, sums: Sums) -> Sums:
        exponents = kept.exponents(keys)
        counts = kept(keys, exponents) & (keys >= least)
        return sums.plus(jnp.where(counts, power(exponents), jnp.uint32(0)))

    return row.reduce(add, Sums(jnp.uint32(0), jnp.uint32(0)))


def _top_p(row: Row, kept: Kept) -> jax.Array:
    """The key up to which the tokens kept have `top_p` of the probability: those with larger keys have less."""
    goal = _total(row, kept, kept.least).share(kept.rates.top_p)
    least_key = jnp.maximum(kept.least, largest(lambda least: _total(row, kept, least).reaches(goal)))
    return jnp.where(kept.rates.top_p >= 1 << 16, kept.least, least_key)


def _top_p_alone(row: Row, few: Row, dropped: jax.Array, kept: Kept, block_v: int) -> tuple[Row, Kept]:
    """The row and the tokens kept by `top_p`, without `top_k`.

    The probability of all tokens comes from one more pass. If the candidates above the largest key of the other tokens
    have enough of it, they are the tokens kept. Otherwise the least key is found in the whole row.
    """
    keeps_all = kept.rates.top_p >= 1 << 16
    goal = _total(row, kept, kept.least).share(kept.rates.top_p)
    least = largest(lambda least: _total(few, kept, least).reaches(goal))
    suffices = (dropped < least) & ~keeps_all
    row = narrowed(row, few, least, suffices, block_v)
    bits = jnp.where(suffices | keeps_all, 0, 32)
    least = largest(lambda least: _total(row, kept, least).reaches(goal), jnp.where(suffices, least, LEAST), bits)
    return row, kept._replace(least=jnp.maximum(kept.least, least))


def _row(logits: Any, rates: Rates, penalties: Penalties | None, block_v: int) -> tuple[Row, Kept]:
    """The row of a program, and the tokens that are kept."""
    r = tk.parallel(logits.shape[0])
    row = Row(logits, penalties, r, tk.serial(logits.shape[1], block_v))
    return kept_tokens(row, Rates(*(None if rate is None else rate[r] for rate in rates)), block_v)


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
    row, kept = _row(logits, rates, penalties, block_v)
    key_data = keys[row.number]
    is_greedy = kept.rates.scale == jnp.inf

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
    row, kept = _row(logits, rates, penalties, block_v)
    is_greedy = kept.rates.scale == jnp.inf

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


def _ranks(others: tuple[Any, ...]) -> int:
    """The candidates of a lane; 0 without `top_k` and `top_p`."""
    (rates,) = [other for other in others if isinstance(other, Rates)]
    return _RANKS_OF_TOP_K if rates.top_k is not None else 0 if rates.top_p is None else _RANKS_OF_TOP_P


@sampled_tokens.schedule("cpu")
@kept_logits.schedule("cpu")
def _cpu(logits: Any, *others: Any) -> dict[str, int]:
    """A tile in the first-level cache, with its candidates if all passes for `top_p` visit them."""
    return {"block_v": min(logits.shape[1], 1024 if _ranks(others) == _RANKS_OF_TOP_P else 4096)}


@sampled_tokens.schedule("cuda")
@kept_logits.schedule("cuda")
def _cuda(logits: Any, *others: Any) -> dict[str, int]:
    """A fourth of a tile with candidates, which lie in registers."""
    block_v, num_warps = (1024, 16) if _ranks(others) else (4096, 8)
    return {"block_v": power_of_two(logits.shape[1], block_v), "num_warps": num_warps}


@sampled_tokens.schedule("tpu")
@kept_logits.schedule("tpu")
def _tpu(logits: Any, *others: Any) -> dict[str, int]:
    """Fewer lanes for `top_p`, so that its candidates are a fourth of a vocabulary of 2^17."""
    return {"block_v": tiled(logits.shape[1], 1 << (13 if _ranks(others) == _RANKS_OF_TOP_P else 15), 1024)}
