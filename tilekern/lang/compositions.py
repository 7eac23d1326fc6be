"""Primitives that JAX composes of others: polynomials, the total order of floats, and the primitives of `hijax`.

`jnp.searchsorted`, and with it `jnp.digitize` and `jnp.interp`, is a primitive of `hijax` since JAX 0.12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilekern._jax import JaxprEqn


def composition(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """The function of flat operands that the primitive of `eqn`, one of `COMPOSED`, computes."""
    if eqn.primitive.name in _COMPOSITIONS:
        return _COMPOSITIONS[eqn.primitive.name]
    primitive: Any = eqn.params["_prim"]

    def expand(*operands: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    return expand


def _horner(x: jax.Array, *coefficients: jax.Array) -> list[Any]:
    """[Σ coefficients[k] xᵏ], in the shape that all operands have together."""
    shape = jnp.broadcast_shapes(x.shape, *(c.shape for c in coefficients))
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return [jnp.broadcast_to(total, shape)]


def _total_order(x: jax.Array) -> jax.Array:
    """Integers in the order of `x`; for floats -NaN < -inf < … < -0 < 0 < … < inf < NaN, the totalOrder of IEEE 754."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    width = 8 * x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{width}"))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)  # magnitudes of negative numbers count down


def _less(x: jax.Array, y: jax.Array) -> list[Any]:
    return [_total_order(x) < _total_order(y)]


def _less_or_equal(x: jax.Array, y: jax.Array) -> list[Any]:
    return [_total_order(x) <= _total_order(y)]


_COMPOSITIONS: dict[str, Callable[..., list[Any]]] = {
    "polynomial": _horner,
    "lt_to": _less,
    "le_to": _less_or_equal,
}

COMPOSED = ("call_hi_primitive", *_COMPOSITIONS)
"""The names of these primitives."""
