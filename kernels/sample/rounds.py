"""Rows without a token, drawn in rounds: some rows at a time have their logits in memory.

A round ends where no row without a token is left, so it costs nothing where one pass over the weight drew all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.product import Operands

LOGITS = 4 << 20
"""Logits that a device has in memory at a time, unless one row has more."""
FEW_ROWS = 16
"""Rows of a round where most rows have their token: a product of so many takes the time of reading the weight."""


class Draw(NamedTuple):
    """What draws are made of: arrays with a number or a row for each row of the logits.

    Attributes:
      operands: of the logits; with devices, of one device's tokens.
      keys: uint32[B, 2].
      rates: of the rows.
      penalties: of the tokens, or None.
    """

    operands: Operands
    keys: jax.Array
    rates: Rates
    penalties: Penalties | None

    def at(self, places: jax.Array) -> Draw:
        """The draws of some rows; of the last row for places past it."""

        def rows_of(array: jax.Array) -> jax.Array:
            return array.at[places].get(mode="clip")

        operands = self.operands._replace(hidden=rows_of(self.operands.hidden))
        return Draw(operands, *jax.tree.map(rows_of, (self.keys, self.rates, self.penalties)))


def drawn_in_rounds(tokens: jax.Array, size: int, draw: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """int32[B]: the tokens, and a drawn token for each row that has -1.

    Args:
      tokens: int32[B].
      size: rows of a round.
      draw: returns int32[size], drawn tokens of the rows at int32[size] places; tokens for places past B do not count.
    """
    rows = tokens.shape[0]
    number = jnp.arange(size, dtype=jnp.int32)
    # Rows without a token come first. Places behind the last row are no row.
    order = jnp.pad(jnp.argsort(tokens >= 0).astype(jnp.int32), (0, size), constant_values=rows)
    undecided = (tokens < 0).sum(dtype=jnp.int32)

    def round_of(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, drawn = carry
        places = lax.dynamic_slice(order, (begin,), (size,))
        places = jnp.where(begin + number < undecided, places, rows)
        return begin + size, drawn.at[places].set(draw(places), mode="drop")

    def goes_on(carry: tuple[jax.Array, Any]) -> jax.Array:
        return carry[0] < undecided

    return lax.while_loop(goes_on, round_of, (jnp.zeros_like(undecided), tokens))[1]
