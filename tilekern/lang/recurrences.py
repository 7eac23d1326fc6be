"""Linear recurrences along a dim of a tile: the function `linear_scan` and its JAX primitive."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern import _jax
from tilekern.errors import ArgumentError, checked
from tilekern.lang.tiles import describe


@checked
def linear_scan(factors: Any, terms: Any, axis: int = 0, *, reverse: bool = False) -> jax.Array:
    """h_i = factors_i h_{i-1} + terms_i along an axis, with 0 before the first: a linear recurrence.

    With a state h before the tile, add factors_0 h to terms_0. Floats narrower than float32 are computed in float32,
    and rounded once. Backends may multiply neighbouring factors first: with factors of at most 1 in size no product
    overflows; otherwise, and with an infinite or NaN factor, even the first, a result may be NaN where the
    recurrence itself is finite. Cumulative products and sums are `jnp.cumprod` and `jnp.cumsum`.

    Args:
      factors: a tile of floats.
      terms: a tile of the same shape and dtype.
      axis: the dim along which the recurrence runs. Vectors run side by side along the last dim, so on CPUs and TPUs
        an earlier dim is faster.
      reverse: run from the end: h_i = factors_i h_{i+1} + terms_i.

    Returns:
      All h, of the shape and dtype of `terms`.
    """
    a, b = (jnp.asarray(x) if _jax.is_array(x) else x for x in (factors, terms))
    fits = _jax.is_array(a) and _jax.is_array(b) and jnp.issubdtype(b.dtype, jnp.floating)
    fits = fits and type(axis) is int and -b.ndim <= axis < b.ndim and type(reverse) is bool
    if not (fits and (a.shape, a.dtype) == (b.shape, b.dtype)):
        raise ArgumentError(
            "tk.linear_scan takes two tiles of floats",
            expected="factors and terms of one shape and one float dtype, one of their dims, and a bool",
            got=f"factors = {describe(factors)}, terms = {describe(terms)}, axis = {axis!r}, reverse = {reverse!r}",
            fix="broadcast with jnp.broadcast_to, cast with .astype",
        )
    wide = jnp.promote_types(b.dtype, jnp.float32)
    states = _scan(a.astype(wide), b.astype(wide), axis % b.ndim, reverse)
    return states.astype(b.dtype)


def _type(factors: Any, terms: Any, **_: Any) -> _jax.ShapedArray:
    return _jax.ShapedArray(terms.shape, terms.dtype)


linear_scan_p = _jax.primitive("linear_scan", _type)


def _scan(factors: Any, terms: Any, axis: int, reverse: bool) -> jax.Array:
    return _jax.bind(linear_scan_p, factors, terms, axis=axis, reverse=reverse)


def _shifted(x: jax.Array, axis: int, by: int) -> jax.Array:
    """The elements of `x` moved by one along an axis, with 0 where no element comes."""
    ends = [(0, 0, 0)] * x.ndim
    ends[axis] = (by, -by, 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ends)


def _jvp(primals: Any, tangents: Any, *, axis: int, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """dh_i = a_i dh_{i-1} + da_i h_{i-1} + db_i."""
    dfactors, dterms = (_jax.instantiated(t) for t in tangents)
    factors, terms = primals
    states = _scan(factors, terms, axis, reverse)
    return states, _scan(factors, dfactors * _shifted(states, axis, -1 if reverse else 1) + dterms, axis, reverse)


def _transpose(cotangent: Any, factors: Any, terms: Any, *, axis: int, reverse: bool) -> tuple[None, jax.Array]:
    """g_i = c_i + a_{i+1} g_{i+1}."""
    ahead = _shifted(factors, axis, 1 if reverse else -1)
    return None, _scan(ahead, _jax.instantiated(cotangent), axis, not reverse)


def _batch(operands: Any, dims: Any, *, axis: int, reverse: bool) -> tuple[jax.Array, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    factors, terms = (
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    )
    return _scan(factors, terms, axis + 1, reverse), 0


_jax.register_rules(linear_scan_p, jvp=_jvp, batch=_batch, transpose=_transpose)
