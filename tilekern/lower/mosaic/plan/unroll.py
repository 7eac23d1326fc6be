"""Loops with several iterations written out at once, so that matrix and vector units work side by side.

Where vector units reduce what a dot gives, as for the maximum of logits, one of the two always waits for the other
within an iteration. The first dot of the next iteration does not: it needs no carries. The compiler moves it up if both
iterations are in one stretch of code. Attention forward takes 2 to 15 % less by the static estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Value
from tilekern.ir.ordering import ArgReduce

Body = Callable[[Any, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Rounds:
    """How a loop inside of the kernel is written out.

    Attributes:
      at_once: so many iterations of it in one round.
      repeated: whether there is a loop over rounds; otherwise one round is all.
    """

    at_once: int = 1
    repeated: bool = True


def rounds_of(op: Fold, ranges: Mapping[Value, Interval]) -> Rounds:
    """How a loop is written out: one iteration a round, unless a dot or reduction uses what a dot of it gives.

    Four iterations a round would take too much code where one to three may be left over.
    """
    known = trips(op, ranges)
    if known in (0, 1):
        return Rounds(1, False)
    if not _waits(op):
        return Rounds()
    if known is not None and known <= 4:
        return Rounds(known, False)
    return Rounds(2 if known is None or known % 4 else 4)


def trips(op: Fold, ranges: Mapping[Value, Interval]) -> int | None:
    """How many iterations a loop has; None where that is not known before the program runs."""
    start, stop = (ranges.get(bound) for bound in (op.start, op.stop))
    if start is None or stop is None or not (start.known and stop.known):
        return None
    return max(0, op.axis.end_tile(stop.low) - op.axis.first_tile(start.low))


def _waits(op: Fold) -> bool:
    later = set[Value]()  # what dots of the iteration give, and all that follows from it
    for inner in op.body.ops:
        follows = not later.isdisjoint(inner.operands)
        if follows and isinstance(inner, Dot | Reduce | ArgReduce):
            return True
        if follows or isinstance(inner, Dot):
            later.update(inner.results)
    return False


def loop(first: Any, last: Any, body: Body, inits: Sequence[Any], count: int) -> Sequence[Any]:
    """`lax.fori_loop`, with `count` iterations written out at once and the rest one by one. Few become no loop."""
    known = isinstance(first, np.integer) and isinstance(last, np.integer)
    tiles = max(last - first, np.int32(0)) if known else jnp.maximum(last - first, 0)
    rounds = tiles // count if known else lax.div(tiles, jnp.asarray(count, tiles.dtype))

    def several(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
        for n in range(count):
            carried = body(first + count * i + n, carried)
        return tuple(carried)

    found = _repeat(np.int32(0), rounds, several, tuple(inits))
    return _repeat(first + count * rounds, first + tiles, body, found) if count > 1 else found


def _repeat(first: Any, last: Any, body: Body, inits: Sequence[Any]) -> Sequence[Any]:
    if isinstance(first, np.integer) and isinstance(last, np.integer) and last - first <= 1:
        return body(first, inits) if last > first else inits
    return cast(Any, lax.fori_loop(first, last, body, inits))
