"""The pairs of tokens of a chunk, by the block in whose halves they are."""

from __future__ import annotations

from collections.abc import Iterator

import jax


def halves(row: jax.Array, column: jax.Array, size: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """For each level of a chunk of `size` tokens two masks [C, C]: pairs of tokens, and tokens from a row to a middle.

    In the second mask, a row in the lower half of a block has the tokens from the block's middle up to the row. A row
    in the upper half has the tokens after the row up to the middle.
    """
    half = 1
    while half < size:
        lower = row // half % 2 == 1
        same = row // half == column // half
        pairs = (row // (2 * half) == column // (2 * half)) & lower & (column // half % 2 == 0)
        yield pairs, same & ((lower & (column <= row)) | (~lower & (column > row)))
        half *= 2
