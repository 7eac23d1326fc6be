"""Sizes that are symbols, as `jax.export` has them: known only when the exported program runs."""

from __future__ import annotations

from typing import Any

import jax

from tilekern import _jax

CHUNKS = 256, 16, 1
"""Sizes of chunks along the last symbolic dim; along the others chunks are single elements.

A program has the kernel for each size, and takes the largest of which two chunks fit the dim. So less than a third of
the work is for elements behind the end.
"""

MOST_BYTES = 8 << 20
"""The most bytes of a chunk of several elements, operands and results: elements of more bytes keep all cores busy."""

STAND_IN = 3 * max(CHUNKS)
"""The size that stands for each symbol in proofs and in schedules; a multiple of each chunk."""


def with_sizes(x: Any) -> Any:
    """The type of an array with `STAND_IN` in the place of each symbol; an array without symbols is returned."""
    if not _jax.has_symbols(x):
        return x
    shape = tuple(STAND_IN if jax.export.is_symbolic_dim(size) else size for size in x.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype)
