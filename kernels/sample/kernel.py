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


NO_TOKEN = 2**31 - 1
"""A number above those of all tokens."""


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


class Drawable(NamedTuple):
    """Which tokens of a row may be drawn.

    Attributes:
      rates: of the row, scalars.
      best: the key of the row's largest logit.
      least: the key of the least likely token that `top_k` and `top_p` leave in the draw.
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
        """A bool for each token: True if the token may be drawn. `exponents` are `self.exponents(keys)`."""
        reaches = keys >= self.least
        return reaches if self.rates.min_p is None else reaches & (exponents >= self.rates.min_p)


_RANKS_OF_TOP_K = 2
"""The largest keys of a lane that are candidates: of 64 tokens in 1024 lanes, three share a lane in 4% of all rows."""
_RANKS_OF_TOP_P = 4
"""More, as `top_p` may keep hundreds of tokens: of 200 in 1024 lanes, five share a lane in 0.2% of all rows."""


def drawable_tokens(row: Row, rates: Rates, block_v: int) -> tuple[Row, Drawable]:
    """The tokens of a row that pass `min_p`, then `top_k` among these, then `top_p` among those; and the row to visit.

    `reduce` of the returned row visits only candidates where one pass over all tokens proves that every drawable token
    is a candidate. Example: with top_k=20, a row of 128256 tokens, and no three of its 20 largest logits in one lane,
    it visits 2 tokens for each lane of a tile.
    """
    few, dropped = row, jnp.int32(LEAST)
    if rates.top_k is not None or rates.top_p is not None:
        few, dropped = candidates(row, _RANKS_OF_TOP_P if rates.top_k is None else _RANKS_OF_TOP_K, block_v)
    best = best_key(few)
    drawable = of_best(rates, best)
    if rates.top_k is None:
        return (row, drawable) if rates.top_p is None else _top_p_alone(row, few, dropped, drawable, block_v)
    # The k-th largest candidate is at most the k-th largest key of the row.
    least = jnp.maximum(largest(lambda least: count_of(few, least) >= rates.top_k), LEAST + 1)
    row = narrowed(row, few, least, dropped < least, block_v)
    drawable = drawable._replace(least=_top_k(row, drawable))
    return row, drawable if rates.top_p is None else drawable._replace(least=_top_p(row, drawable))


def of_best(rates: Rates, best: jax.Array) -> Drawable:
    """The drawable tokens before `top_k` and `top_p`: tokens of -inf are not drawn unless all are."""
    return Drawable(rates, best, jnp.minimum(best, LOWEST + 1))


def best_key(row: Row) -> jax.Array:
    """int32: the largest key of a row."""
    return row.reduce(lambda tokens, keys, most: jnp.maximum(most, keys.max()), jnp.int32(LEAST))


def count_of(row: Row, least: jax.Array, counts: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """int32: how many keys are at least `least`, of those for which counts(keys) holds."""

    def count(tokens: jax.Array, keys: jax.Array, total: jax.Array) -> jax.Array:
        is_counted = keys >= least if counts is None else counts(keys) & (keys >= least)
        return total + is_counted.sum(dtype=jnp.int32)

    return row.reduce(count, jnp.int32(0))


def _top_k(row: Row, drawable: Drawable) -> jax.Array:
    """The k-th largest key of the drawable tokens; their least key if there are fewer than k."""

    def is_drawable(keys: jax.Array) -> jax.Array:
        return drawable(keys, drawable.exponents(keys))

    def reaches(least: jax.Array) -> jax.Array:
        return count_of(row, least, is_drawable) >= drawable.rates.top_k

    return jnp.maximum(drawable.least, largest(reaches))


def _total(row: Row, drawable: Drawable, least: jax.Array) -> Sums:
    """The sum of the weights of the drawable tokens whose keys are at least `least`."""

    def add(tokens: jax.Array, keys: jax.Array, sums: Sums) -> Sums:
        exponents = drawable.exponents(keys)
        counts = drawable(keys, exponents) & (keys >= least)
        return sums.plus(jnp.where(counts, power(exponents), jnp.uint32(0)))

    return row.reduce(add, Sums(jnp.uint32(0), jnp.uint32(0)))


def _goal(row: Row, drawable: Drawable) -> Sums:
    """The part `top_p` of the weight of all drawable tokens."""
    return _total(row, drawable, drawable.least).share(drawable.rates.top_p)


def _least_of(row: Row, drawable: Drawable, goal: Sums, key: Any = LEAST, bits: Any = 32) -> jax.Array:
    """The largest key down to which the drawable tokens have the weight `goal`; `key` and `bits` as for `largest`."""
    return largest(lambda least: _total(row, drawable, least).reaches(goal), key, bits)


def _top_p(row: Row, drawable: Drawable) -> jax.Array:
    """The least key of the tokens of `top_p`: the tokens above it have less than the part `top_p` of the weight."""
    least = jnp.maximum(drawable.least, _least_of(row, drawable, _goal(row, drawable)))
    return jnp.where(drawable.rates.top_p >= 1 << 16, drawable.least, least)


def _top_p_alone(row: Row, few: Row, dropped: jax.Array, drawable: Drawable, block_v: int) -> tuple[Row, Drawable]:
    """The row to visit and the tokens of `top_p`, without `top_k`.

    The weight of all tokens comes from one more pass. If the candidates above `dropped`, the largest key of the tokens
    that are no candidates, have the part `top_p` of it, they are the tokens of `top_p`. Otherwise the least key comes
    from passes over the whole row.
    """
    keeps_all = drawable.rates.top_p >= 1 << 16
    goal = _goal(row, drawable)
    least = _least_of(few, drawable, goal)
    suffices = (dropped < least) & ~keeps_all
    row = narrowed(row, few, least, suffices, block_v)
    bits = jnp.where(suffices | keeps_all, 0, 32)
    least = _least_of(row, drawable, goal, jnp.where(suffices, least, LEAST), bits)
    return row, drawable._replace(least=jnp.maximum(drawable.least, least))


def _row(logits: Any, rates: Rates, penalties: Penalties | None, block_v: int) -> tuple[Row, Drawable]:
    """The row of a program, and its tokens that may be drawn."""
    r = tk.parallel(logits.shape[0])
    row = Row(logits, penalties, r, logits.shape[1], tk.serial(logits.shape[1], block_v))
    return drawable_tokens(row, rates_of(rates, r), block_v)


def rates_of(rates: Rates, r: Any) -> Rates:
    """The rates of row r, or of the rows of tile r."""
    return Rates(*(None if rate is None else rate[r] for rate in rates))


def drawn_token(row: Row, drawable: Drawable, key_data: jax.Array) -> jax.Array:
    """int32: the token with the largest score; of equal ones the one with the least number.

    A score is log2 of a token's probability plus a number of the Gumbel distribution; of greedy rows, the logit's key.
    """
    is_greedy = drawable.rates.scale == jnp.inf

    def step(numbers: jax.Array, keys: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        score, token = best
        exponents = drawable.exponents(keys)
        drawn = exponents + gumbel(tk.random_bits(key_data, numbers))
        scores = jnp.where(drawable(keys, exponents), jnp.where(is_greedy, keys, drawn), LEAST)
        most = scores.max()
        first = jnp.where(scores == most, numbers, NO_TOKEN).min()
        # Candidates are in no order, so of equal scores the least number is taken.
        first = jnp.where(most == score, jnp.minimum(token, first), first)
        return jnp.maximum(score, most), jnp.where(most >= score, first, token)

    return row.reduce(step, (jnp.int32(LEAST), jnp.int32(NO_TOKEN)))[1]


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
    row, drawable = _row(logits, rates, penalties, block_v)
    tokens[row.number] = drawn_token(row, drawable, keys[row.number])


def _like_logits(logits: Any, *unused: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape, jnp.float32)


@tk.kernel(out_type=_like_logits)
def drawable_logits(
    logits: tk.Ref, rates: Rates, penalties: Penalties | None, out: tk.Ref, *, block_v: tk.Block = 1024
) -> None:
    """logits[B, V], V > 0 -> float32[B, V]: the logarithm of probabilities up to a constant; -inf where none is drawn.

    They are differences from the largest logit, divided by the temperature; greedy rows keep the first of the largest.
    """
    row, drawable = _row(logits, rates, penalties, block_v)
    is_greedy = drawable.rates.scale == jnp.inf

    def first(numbers: jax.Array, keys: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.minimum(token, jnp.where(keys == drawable.best, numbers, NO_TOKEN).min())

    token = row.reduce(first, jnp.int32(NO_TOKEN))

    def write(j: tk.Tile) -> None:
        keys = row.keys(j)
        exponents = drawable.exponents(keys)
        keeps = jnp.where(is_greedy, j.indices == token, drawable(keys, exponents))
        logarithms = exponents.astype(jnp.float32) * jnp.float32(_LN_2)
        out[row.number, j] = jnp.where(keeps, logarithms, -jnp.inf)

    tk.foreach(tk.serial(logits.shape[1], block_v), write)


_LN_2 = 0.6931471805599453 * 2.0**-20


def _ranks(arguments: tuple[Any, ...]) -> int:
    """The candidates of a lane; 0 without `top_k` and `top_p`."""
    (rates,) = [argument for argument in arguments if isinstance(argument, Rates)]
    return _RANKS_OF_TOP_K if rates.top_k is not None else 0 if rates.top_p is None else _RANKS_OF_TOP_P


@sampled_tokens.schedule("cpu")
@drawable_logits.schedule("cpu")
def _cpu(logits: Any, *arguments: Any) -> dict[str, int]:
    """A tile in the first-level cache, with its candidates if all passes for `top_p` visit them."""
    return {"block_v": min(logits.shape[1], 1024 if _ranks(arguments) == _RANKS_OF_TOP_P else 4096)}


@sampled_tokens.schedule("cuda")
@drawable_logits.schedule("cuda")
def _cuda(logits: Any, *arguments: Any) -> dict[str, int]:
    """A fourth of a tile with candidates, which lie in registers."""
    block_v, num_warps = (1024, 16) if _ranks(arguments) else (4096, 8)
    return {"block_v": power_of_two(logits.shape[1], block_v), "num_warps": num_warps}


@sampled_tokens.schedule("tpu")
@drawable_logits.schedule("tpu")
def _tpu(logits: Any, *arguments: Any) -> dict[str, int]:
    """Two registers of lanes: the compiler keeps a hundred and more vectors of a long chain of ops in vector memory."""
    return {"block_v": tiled(logits.shape[1], 2048, 1024)}
