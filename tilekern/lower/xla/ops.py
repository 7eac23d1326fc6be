"""Pure ops as functions of `jax.lax`, for the tiles of one program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Monoid, Reduce, Select, identity
from tilekern.ir.core import Op
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, Cumulative, Scan, Sort
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, F32, DType, accumulator, kind_of

Function = Callable[..., jax.Array]

_ROUNDING = {"round_even": lax.RoundingMethod.TO_NEAREST_EVEN, "round_away": lax.RoundingMethod.AWAY_FROM_ZERO}

_MONOIDS: dict[Monoid, Any] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}

_SCANS: dict[Cumulative, Any] = {
    "sum": lax.cumsum,
    "prod": lax.cumprod,
    "max": lax.cummax,
    "min": lax.cummin,
    "logsumexp": lax.cumlogsumexp,
}


def function_of(op: Op) -> Function:
    """The function of the op's operands that computes its result."""
    match op:
        case Elementwise(function="round_even" | "round_away"):
            return partial(lax.round, rounding_method=_ROUNDING[op.function])
        case Elementwise():
            return getattr(lax, op.row.lax)
        case Constant():
            return lambda: jnp.broadcast_to(jnp.asarray(op.array), op.shape)
        case Select():
            return _select
        case Convert():
            return partial(convert, dtype=op.dtype)
        case Bitcast():
            return partial(lax.bitcast_convert_type, new_dtype=op.dtype)
        case Dot():
            return partial(_dot, op)
        case Reduce():
            return partial(_reduce, op)
        case _:
            return _shape_function(op)


def _shape_function(op: Op) -> Function:
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
        case Pad():
            return partial(lax.pad, padding_config=tuple(zip(op.low, op.high, op.interior, strict=True)))
        case Reverse():
            return partial(lax.rev, dimensions=op.dims)
        case _:
            return _place_function(op)


def _place_function(op: Op) -> Function:
    """Ops that find places, or whose places are computed."""
    match op:
        case ArgReduce():
            find = lax.argmax if op.extreme == "max" else lax.argmin
            return partial(find, axis=op.dim, index_dtype=jnp.int32)
        case Scan():
            return partial(_scan, op)
        case Sort():
            return partial(_sort, op)
        case DynamicSlice():
            return partial(_dynamic_slice, op)
        case DynamicUpdateSlice():
            return _dynamic_update_slice
        case Take():
            take = jnp.take_along_axis if op.along else jnp.take
            return partial(take, axis=op.dim, mode="clip")
        case _:
            raise NotImplementedError(f"the XLA backend has no rule for {op.name}")


def _select(which: jax.Array, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
    return lax.select_n(which, on_false, on_true)


def _concatenate(dim: int, *tiles: jax.Array) -> jax.Array:
    return lax.concatenate(tiles, dim)


def convert(x: jax.Array, dtype: DType) -> jax.Array:
    """A cast by the language's rules, which are XLA's but for float to bool (not zero)."""
    if dtype == jnp.bool_:
        return lax.ne(x, lax.full_like(x, 0))
    return lax.convert_element_type(x, dtype)


def _dot(op: Dot, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Exact products, never a cheaper precision; narrow operands other than bf16 are widened first."""
    wide = accumulator(lhs.dtype)
    if kind_of(lhs.dtype) == "float" and lhs.dtype not in (BF16, F32):
        lhs, rhs = (lax.convert_element_type(x, wide) for x in (lhs, rhs))
    return lax.dot_general(
        lhs, rhs, (op.contract, op.batch), precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )


def _reduce(op: Reduce, x: jax.Array) -> jax.Array:
    wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
    start = jnp.asarray(identity(op.monoid, x.dtype)).astype(wide)
    total = lax.reduce(x.astype(wide), start, _MONOIDS[op.monoid], op.dims)
    return total.astype(x.dtype)


def _scan(op: Scan, x: jax.Array) -> jax.Array:
    wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
    return _SCANS[op.monoid](x.astype(wide), axis=op.dim, reverse=op.reverse).astype(x.dtype)


def _sort(op: Sort, *operands: jax.Array) -> jax.Array:
    return lax.sort(operands, dimension=op.dim, is_stable=True, num_keys=op.num_keys)[op.pick]


def _dynamic_slice(op: DynamicSlice, x: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, starts, op.sizes, allow_negative_indices=False)


def _dynamic_update_slice(x: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)
