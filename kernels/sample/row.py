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


class Row(NamedTuple):
    """A row of logits, as refs.

    Attributes:
      logits: float [B, V].
      penalties: of the logits, or None.
      number: the row, an int32 scalar.
      columns: the tiles of the row's tokens that `reduce` visits: all, or none if the candidates suffice.
      candidates: tokens and their keys, int32[block_v] each, that `reduce` visits before `columns`; a key of `LEAST` is
        no token.
    """

    logits: Any
    penalties: Penalties | None
    number: Any
    columns: Any
    candidates: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def keys(self, j: tk.Tile) -> jax.Array:
        """int32[block_v], the logits behind their penalties by `ordered`; `LEAST` behind the last token."""
        x = self.logits[self.number, j].astype(jnp.float32)
        if self.penalties is not None:
            x = _penalized(x, self.penalties, self.number, j)
        return jnp.where(j.valid, ordered(x), LEAST)

    def reduce[T](self, step: Callable[[jax.Array, jax.Array, T], T], init: T) -> T:
        """Fold step(tokens, their keys, carry) over the candidates and the tiles of the row."""
        for tokens, keys in self.candidates:
            init = step(tokens, keys, init)
        return tk.fold(self.columns, lambda j, carry: step(j.indices, self.keys(j), carry), init)


def _penalized(x: jax.Array, penalties: Penalties, r: Any, j: tk.Tile) -> jax.Array:
    """The logits behind their penalties.

    Each product is exact, or is no term of a sum: it makes no difference whether a compiler fuses it with the sum.
    """
    counts = penalties.counts[r, j]
    occurs = counts > 0
    if penalties.repetition is not None:
        of_negative, of_positive = penalties.repetition[r, 0], penalties.repetition[r, 1]
        repeated = jnp.where(x > 0, x * of_positive, x * of_negative)
        # Only through its bits: as floats, the product and the next difference could be fused.
        x = from_ordered(ordered(jnp.where(counts != 0, repeated, x)))
    if penalties.frequency is not None:
        times = jnp.clip(counts, 0, 4095).astype(jnp.float32)
        x = x - penalties.frequency[r, 0] * times - penalties.frequency[r, 1] * times
    if penalties.presence is not None:
        x = x - jnp.where(occurs, penalties.presence[r], jnp.float32(0))
    return x


def largest(reaches: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 for which `reaches` holds, bit by bit from the sign on; the least int32 if there is none.

    `reaches` holds up to some number, and not from there on.
    """

    def step(n: jax.Array, found: jax.Array) -> jax.Array:
        raised = found + (jnp.int32(1) << (31 - n))  # with the sign bit, from the least number to 0
        return jnp.where(reaches(raised), raised, found)

    return tk.fold(tk.serial(32), step, jnp.int32(LEAST))


_RANKS = 2
"""The largest keys of a lane that are candidates: of 64 tokens in 1024 lanes, three share a lane in 4% of all rows."""


def with_candidates(row: Row, top_k: jax.Array, block_v: int) -> Row:
    """The row, whose `reduce` visits few tokens, all that are among the `top_k` largest, where one pass can tell them.

    Each lane of the tiles holds the largest keys among its tokens, the candidates, and the largest key of the other
    ones. The k-th largest candidate is at most the k-th largest key of the row. If it is above all keys that are no
    candidates, every token from it on is a candidate, equal ones included. Otherwise `reduce` visits the whole row.
    """
    none = jnp.zeros((block_v,), jnp.int32), jnp.full((block_v,), LEAST, jnp.int32)

    def step(j: tk.Tile, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        ranks, dropped = carry
        tokens, keys, raised = j.indices, row.keys(j), list[tuple[jax.Array, jax.Array]]()
        for held, key in ranks:
            exceeds = keys > key
            raised.append((jnp.where(exceeds, tokens, held), jnp.maximum(keys, key)))
            tokens, keys = jnp.where(exceeds, held, tokens), jnp.minimum(keys, key)
        return tuple(raised), jnp.maximum(dropped, keys)

    init: tuple[Any, jax.Array] = (none,) * _RANKS, none[1]
    ranks, dropped = tk.fold(row.columns, step, init)

    def reaches(least: jax.Array) -> jax.Array:
        counts = [(keys >= least).sum(dtype=jnp.int32) for _, keys in ranks]
        return sum(counts, jnp.int32(0)) >= top_k

    least = jnp.maximum(largest(reaches), LEAST + 1)
    suffices = dropped.max() < least
    vocabulary = row.logits.shape[1]
    columns = tk.serial(vocabulary, block_v, stop=jnp.where(suffices, 0, vocabulary))
    return row._replace(
        columns=columns,
        candidates=tuple((tokens, jnp.where(suffices & (keys >= least), keys, LEAST)) for tokens, keys in ranks),
    )
