"""Functions of rows whose number is a symbol of `jax.export`, and which no rule divides: they are called on chunks.

Grouped rows depend on their place. The rows start, ..., start + size - 1 are grouped by the ends of groups as seen from
there, clip(ends - start, 0, size). What follows the last row is in no group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import scan_rows


def over_rows(function: Callable[..., Any], *arrays: Any) -> Any:
    """function(start, *arrays), for chunks of rows if the number of rows is a symbol.

    Args:
      function: returns a pytree of arrays [M, ...]. In the last chunk, copies of the first row follow the last row.
      arrays: the first one is [M, ...]. If M is a symbol, the function gets chunks of all arrays [M, ...], and the
        number of the chunk's first row as `start`, int32; else `start` is 0. Other arrays, and None, are passed on.
    """
    rows = arrays[0].shape[0]
    if not jax.export.is_symbolic_dim(rows):
        return function(0, *arrays)
    is_cut = [x is not None and x.shape[:1] == (rows,) for x in arrays]

    def step(start: jax.Array, carry: None, *chunks: jax.Array) -> tuple[None, Any]:
        parts = iter(chunks)
        return carry, function(start, *(next(parts) if cut else x for x, cut in zip(arrays, is_cut, strict=True)))

    return scan_rows(step, None, *(x for x, cut in zip(arrays, is_cut, strict=True) if cut))[1]


def sum_over_rows(function: Callable[..., jax.Array], total: jax.Array, *arrays: jax.Array) -> jax.Array:
    """function(start, total, *arrays), which adds a sum over the M rows of arrays [M, ...]; M is a symbol."""

    def step(start: jax.Array, total: jax.Array, *chunks: jax.Array) -> tuple[jax.Array, None]:
        return function(start, total, *chunks), None

    return scan_rows(step, total, *arrays)[0]


def ends_within(ends: jax.Array, start: Any, rows: int) -> jax.Array:
    """Ends of groups of rows, as seen from the `rows` rows that begin with row `start`."""
    return ends if isinstance(start, int) else jnp.clip(ends - start, 0, rows)
