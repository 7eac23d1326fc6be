"""The pairs of tokens of a chunk, by the block in whose halves they are."""

from __future__ import annotations

from collections.abc import Iterator

import jax


def halves(row: jax.Array, column: jax.Array, size: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """The levels of a chunk of `size` tokens: pairs[C, C] of tokens, and the tokens from a row to its block's middle.

    A row in the lower half of a block has the tokens from the middle up to itself, one in the upper half those behind
    itself up to the middle.
    """
    half = 1
    while half < size:
        lower = row // half % 2 == 1
        same = row // half == column // half
        pairs = (row // (2 * half) == column // (2 * half)) & lower & (column // half % 2 == 0)
        yield pairs, same & ((lower & (column <= row)) | (~lower & (column > row)))
        half *= 2
