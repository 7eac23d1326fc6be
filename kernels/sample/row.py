"""A row of logits: its tiles, and the tokens with its largest logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.sample.arguments import Penalties
from tilekern.kernels.sample.fixed_point import from_ordered, ordered

LEAST = -(2**31)
"""The key of lanes that are no token, and the score of tokens that are not drawn."""

type Ranks = tuple[tuple[jax.Array, jax.Array], ...]
"""The tokens of each lane with the largest keys, and these keys, in falling order."""


class Row(NamedTuple):
    """A row of logits, as refs.

    Attributes:
      logits: float [B, V]; or a `Product`, whose tiles are computed at each visit.
      penalties: of the logits, or None.
      number: the row, an int32 scalar.
      stop: the end of the tokens that are visited, an int32 scalar or int: V, or 0 for a row that needs no visit.
      columns: the tiles of the row's tokens that `reduce` visits: all, or none if the candidates suffice; None for a
        row of candidates alone.
      candidates: tokens and their keys, int32[ranks, block_v] each, that `reduce` visits before `columns`; a key of
        `LEAST` is no token. None for a row without candidates.
      tokens: int32[B, V], the number of each logit's token; None if the logits are in the order of the tokens.
    """

    logits: Any
    penalties: Penalties | None
    number: Any
    stop: Any
    columns: Any
    candidates: tuple[jax.Array, jax.Array] | None = None
    tokens: Any = None

    def numbers(self, j: tk.Tile) -> jax.Array:
        """int32[block_v], the tokens of a tile."""
        return j.indices if self.tokens is None else self.tokens[self.number, j]

    def keys(self, j: tk.Tile) -> jax.Array:
        """int32[block_v], the logits behind their penalties by `ordered`; `LEAST` behind the last token."""
        return jnp.where(j.valid, ordered(penalized_logits(self.logits, self.penalties, self.number, j)), LEAST)

    def reduce[T](self, step: Callable[[jax.Array, jax.Array, T], T], init: T) -> T:
        """Fold step(tokens, their keys, carry) over the candidates and the tiles of the row."""
        if self.candidates is not None:
            init = step(*self.candidates, init)
        if self.columns is None:
            return init
        return tk.fold(self.columns, lambda j, carry: step(self.numbers(j), self.keys(j), carry), init)


def penalized_logits(logits: Any, penalties: Penalties | None, r: Any, j: tk.Tile) -> jax.Array:
    """float32: the logits behind their penalties, [block_v] of one row r, [block_b, block_v] of a tile of rows.

    Each product is exact, or is no term of a sum: it makes no difference whether a compiler fuses it with the sum.
    """
    x = logits[r, j].astype(jnp.float32)
    if penalties is None:
        return x
    counts = penalties.counts[r, j]
    occurs = counts > 0
    if penalties.repetition is not None:
        of_negative, of_positive = of_rows(penalties.repetition[r, 0]), of_rows(penalties.repetition[r, 1])
        repeated = jnp.where(x > 0, x * of_positive, x * of_negative)
        # Only through its bits: as floats, the product and the next difference could be fused.
        x = from_ordered(ordered(jnp.where(counts != 0, repeated, x)))
    if penalties.frequency is not None:
        times = jnp.clip(counts, 0, 4095).astype(jnp.float32)
        x = x - of_rows(penalties.frequency[r, 0]) * times - of_rows(penalties.frequency[r, 1]) * times
    if penalties.presence is not None:
        x = x - jnp.where(occurs, of_rows(penalties.presence[r]), jnp.float32(0))
    return x


def of_rows(numbers: jax.Array) -> jax.Array:
    """[block_b, 1] of one number for each row; the number itself, a scalar, of one row."""
    return numbers[:, None] if numbers.ndim else numbers


def largest(reaches: Callable[[jax.Array], jax.Array], key: Any = LEAST, bits: Any = 32) -> jax.Array:
    """The largest int32 for which `reaches` holds, bit by bit from the sign on; the least int32 if there is none.

    `reaches` holds up to some number, and not from there on. With `bits` 0 the result is `key`.
    """

    def step(n: jax.Array, least: jax.Array) -> jax.Array:
        larger = least + (jnp.int32(1) << (31 - n))  # with the sign bit, from the least number to 0
        return jnp.where(reaches(larger), larger, least)

    return tk.fold(tk.serial(32, stop=bits), step, jnp.asarray(key, jnp.int32))


def candidates(row: Row, ranks: int, block_v: int) -> tuple[Row, jax.Array]:
    """A row of the candidates alone, and the largest key of the row's other tokens.

    Each lane of the tiles holds the `ranks` largest keys among its tokens. If some least key is above the largest key
    of the other tokens, all tokens from it on are candidates, equal ones included.
    """
    none = jnp.zeros((block_v,), jnp.int32), jnp.full((block_v,), LEAST, jnp.int32)

    def step(j: tk.Tile, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        held, dropped = carry
        held, keys = with_tokens(held, row.numbers(j), row.keys(j))
        return held, jnp.maximum(dropped, keys)

    init: tuple[Any, jax.Array] = (none,) * ranks, none[1]
    held, dropped = tk.fold(row.columns, step, init)
    tokens, keys = zip(*held, strict=True)
    # One tile of all ranks: the program has each step of a pass once, and not once for each rank.
    return row._replace(columns=None, candidates=(jnp.stack(tokens), jnp.stack(keys))), dropped.max()


def with_tokens(held: Ranks, tokens: jax.Array, keys: jax.Array) -> tuple[Ranks, jax.Array]:
    """Candidates of each lane with one more token of the lane, the largest keys first; and the key left over."""
    ranks: Ranks = ()
    for token, key in held:
        exceeds = keys > key
        ranks = *ranks, (jnp.where(exceeds, tokens, token), jnp.maximum(keys, key))
        tokens, keys = jnp.where(exceeds, token, tokens), jnp.minimum(keys, key)
    return ranks, keys


def narrowed(row: Row, few: Row, least: jax.Array, suffices: jax.Array, block_v: int) -> Row:
    """The row, whose `reduce` visits the candidates from `least` on if they suffice, otherwise all tokens."""
    vocabulary = row.logits.shape[1]
    columns = tk.serial(vocabulary, block_v, stop=jnp.where(suffices, 0, row.stop))
    assert few.candidates is not None
    tokens, keys = few.candidates
    return row._replace(columns=columns, candidates=(tokens, jnp.where(suffices & (keys >= least), keys, LEAST)))
