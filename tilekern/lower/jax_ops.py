"""Pure ops as functions of `jax.lax`, the same on every backend that emits JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import lax

from tilekern.ir.compute import Bitcast, Select, combining
from tilekern.ir.core import Op
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Reshape, Slice, Transpose

Function = Callable[..., jax.Array]

_ROUNDING = {"round_even": lax.RoundingMethod.TO_NEAREST_EVEN, "round_away": lax.RoundingMethod.AWAY_FROM_ZERO}


def combiner(monoid: str) -> Function:
    """The function of `jax.lax` that combines two elements under a monoid, or in an atomic update."""
    return getattr(lax, TABLE[combining(monoid)].lax)


def shared_function(op: Op) -> Function | None:
    """The function from an op's operands to its result; None for an op that the backends emit differently."""
    match op:
        case Elementwise(function="round_even" | "round_away"):
            return partial(lax.round, rounding_method=_ROUNDING[op.function])
        case Elementwise():
            return getattr(lax, op.row.lax)
        case Select():
            return _select
        case Bitcast():
            return partial(lax.bitcast_convert_type, new_dtype=op.dtype)
        case _:
            return _shape_function(op)


def _shape_function(op: Op) -> Function | None:
    match op:
        case Broadcast():
            return partial(lax.broadcast_in_dim, shape=op.shape, broadcast_dimensions=op.dims)
        case Reshape():
            return partial(lax.reshape, new_sizes=op.shape)
        case Transpose():
            return partial(lax.transpose, permutation=op.permutation)
        case Iota():
            return lambda: lax.broadcasted_iota(op.dtype, op.shape, op.dim)
        case Slice():
            return partial(lax.slice, start_indices=op.start, limit_indices=op.stop, strides=op.stride)
        case Concatenate():
            return partial(_concatenate, op.dim)
        case _:
            return None


def _select(which: jax.Array, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
    return lax.select_n(which, on_false, on_true)


def _concatenate(dim: int, *tiles: jax.Array) -> jax.Array:
    return lax.concatenate(tiles, dim)
