"""Loops inside of the kernel, with several iterations unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

Body = Callable[[Any, Sequence[Any]], Sequence[Any]]


def unrolled_loop(first: Any, last: Any, body: Body, inits: Sequence[Any], count: int) -> Sequence[Any]:
    """A `lax.fori_loop` over [first, last), with `count` iterations unrolled; the remaining iterations run one by one.

    No loop is emitted where the number of rounds is known to be 0 or 1.
    """
    static = isinstance(first, np.integer) and isinstance(last, np.integer)
    tiles = max(last - first, np.int32(0)) if static else jnp.maximum(last - first, 0)
    rounds = tiles // count if static else lax.div(tiles, jnp.asarray(count, tiles.dtype))

    def unrolled(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
        for n in range(count):
            carried = body(first + count * i + n, carried)
        return tuple(carried)

    carries = _repeat(np.int32(0), rounds, unrolled, tuple(inits))
    return _repeat(first + count * rounds, first + tiles, body, carries) if count > 1 else carries


def _repeat(first: Any, last: Any, body: Body, inits: Sequence[Any]) -> Sequence[Any]:
    if isinstance(first, np.integer) and isinstance(last, np.integer) and last - first <= 1:
        return body(first, inits) if last > first else inits
    return cast(Any, lax.fori_loop(first, last, body, inits))
