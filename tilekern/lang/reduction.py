"""`lax.reduce` with any combiner, rewritten to JAX code that the language supports: a tree that combines neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax
from tilekern._jax import Jaxpr, JaxprEqn
from tilekern.ir.compute import MONOIDS, combining

lax: Any = jax.lax  # typed in parts only

_MONOIDS: dict[str, Callable[..., jax.Array]] = {combining(m): getattr(lax, f"reduce_{m}") for m in MONOIDS}
"""Maps each combiner of one op to the reduction that backends have for it."""

type Tiles = list[jax.Array]


def reduction(eqn: JaxprEqn) -> Callable[..., Tiles]:
    """Make the function that computes an equation of `lax.reduce` from its operands and initial values.

    The combiner must be associative. It gets its operands in order, so it need not be commutative. Each initial value
    is combined once, from the left.
    """
    jaxpr, dims, rank = eqn.params["jaxpr"], tuple(eqn.params["dimensions"]), len(cast(Any, eqn.invars[0].aval).shape)
    whole = _MONOIDS.get(_function_of(jaxpr))

    def reduce(*operands: jax.Array) -> Tiles:
        count = len(operands) // 2
        tiles, inits = list(operands[:count]), operands[count:]
        if whole is not None:
            reduced: Tiles = [whole(tiles[0], dims)]
        else:
            empty = 0 in [tiles[0].shape[d] for d in dims]
            reduced = [] if empty else _tree(jaxpr, tiles, sorted(dims, reverse=True))
        shape = tuple(n for d, n in enumerate(tiles[0].shape) if d not in dims)
        starts = [jnp.broadcast_to(init, shape) for init in inits]
        return _combined(jaxpr, starts, reduced, rank - len(dims)) if reduced else starts

    return reduce


def _function_of(jaxpr: Jaxpr) -> str:
    """Name of the op if the combiner is a single op of its two arguments; else an empty string."""
    inner = cast(Any, jaxpr.jaxpr)
    if len(inner.eqns) != 1:
        return ""
    (eqn,) = inner.eqns
    is_all = list(eqn.outvars) == list(inner.outvars) and len(inner.invars) == 2
    return eqn.primitive.name if is_all and {*map(id, eqn.invars)} == {*map(id, inner.invars)} else ""


def _combined(jaxpr: Jaxpr, left: Tiles, right: Tiles, rank: int) -> Tiles:
    """Apply the combiner, a function of scalars, elementwise to tiles."""

    def of_scalars(*operands: Any) -> list[Any]:
        return _jax.evaluate(jaxpr, cast(Any, jaxpr).consts, operands)

    combine: Callable[..., Any] = of_scalars
    for _ in range(rank):
        combine = jax.vmap(combine)
    return combine(*left, *right)


def _tree(jaxpr: Jaxpr, tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Reduce all elements along `dims`; the result lacks these dims."""
    for dim in dims:
        tiles = [lax.squeeze(x, (dim,)) for x in _one(jaxpr, tiles, dim)]
    return tiles


def _one(jaxpr: Jaxpr, tiles: Tiles, dim: int) -> Tiles:
    """Reduce a dim by combining neighbours; the last element of an odd number is combined at the end."""
    size, rank = tiles[0].shape[dim], len(tiles[0].shape)
    if size == 1:
        return tiles
    even = size - size % 2
    left, right = ([lax.slice_in_dim(x, start, even, 2, dim) for x in tiles] for start in (0, 1))
    reduced = _one(jaxpr, _combined(jaxpr, left, right, rank), dim)
    last = [lax.slice_in_dim(x, even, size, axis=dim) for x in tiles]
    return _combined(jaxpr, reduced, last, rank) if size % 2 else reduced
