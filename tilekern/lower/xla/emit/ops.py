"""Pure ops as functions of `jax.lax`, for the tiles of one program."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.ir.compute import Constant, Convert, Dot, Reduce, identity
from tilekern.ir.core import Op
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Pad, Reverse
from tilekern.ir.types import BF16, DTYPES, F32, F64, DType, accumulator, is_float8, kind_of
from tilekern.lower.jax_ops import Function, combiner, shared_function

_DOT_OPERANDS = (BF16, F32, F64, *(DTYPES[name] for name in ("i8", "i16", "i32")))


def function_of(op: Op) -> Function:
    """The function of the op's operands that computes its result."""
    match op:
        case Elementwise() if _is_widened(op):
            return partial(_in_float32, getattr(lax, op.row.lax))
        case Constant():
            return lambda: jnp.broadcast_to(jnp.asarray(op.array), op.shape)
        case Convert():
            return partial(convert, dtype=op.dtype)
        case Dot():
            return partial(_dot, op)
        case Reduce():
            return partial(_reduce, op)
        case Pad():
            return partial(lax.pad, padding_config=tuple(zip(op.low, op.high, op.interior, strict=True)))
        case Reverse():
            return partial(lax.rev, dimensions=op.dims)
        case _:
            return shared_function(op) or _place_function(op)


def _place_function(op: Op) -> Function:
    """The function of an op that computes indices, or takes computed indices."""
    match op:
        case ArgReduce():
            find = lax.argmax if op.extreme == "max" else lax.argmin
            return partial(find, axis=op.dim, index_dtype=jnp.int32)
        case Scan():
            return partial(_scan, op)
        case LinearScan():
            return partial(_linear_scan, op)
        case Sort():
            return partial(_sort, op)
        case TopK():
            return partial(_top_k, op)
        case DynamicSlice():
            return partial(_dynamic_slice, op)
        case DynamicUpdateSlice():
            return _dynamic_update_slice
        case Take():
            return partial(_take, op)
        case _:
            raise NotImplementedError(f"the XLA backend has no rule for {op.name}")


def _is_widened(op: Elementwise) -> bool:
    """True for functions of 8-bit floats that round: XLA's own lack the dtype, or round intermediate results."""
    exact = op.function in ("nextafter", "round_even", "round_away")
    return is_float8(op.operands[0].tile.dtype) and op.row.result == "same" and not exact


def _in_float32(function: Function, *operands: jax.Array) -> jax.Array:
    """The function in float32, rounded. Its result is an array, at which XLA's loops end.

    LLVM's time for a loop grows exponentially with the casts of 8-bit floats in a row: `x // y` took six minutes.
    """
    return lax.optimization_barrier(function(*(x.astype(jnp.float32) for x in operands)).astype(operands[0].dtype))


def convert(x: jax.Array, dtype: DType) -> jax.Array:
    """Convert to another dtype by the language's rules."""
    if dtype == jnp.bool_:
        return lax.ne(x, lax.full_like(x, 0))
    if kind_of(x.dtype) == "float" and kind_of(dtype) != "float":
        return _to_integer(x, dtype)
    return lax.convert_element_type(x, dtype)


def _to_integer(x: jax.Array, dtype: DType) -> jax.Array:
    """Round toward zero and saturate. XLA does the same, except where it or JAX folds a constant."""
    limits, wide = jnp.iinfo(dtype), lax.convert_element_type(x, accumulator(x.dtype))
    below, above = wide <= float(limits.min), wide >= float(limits.max)
    inside = lax.convert_element_type(jnp.where(below | above | jnp.isnan(wide), 0, wide), dtype)
    low, high = (jnp.asarray(limit, dtype) for limit in (limits.min, limits.max))
    return jnp.where(below, low, jnp.where(above, high, inside))


def _dot(op: Dot, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A dot of exact products, never of a cheaper precision; operands of dtypes that XLA lacks are widened.

    Integers with more bits than the accumulator are truncated, since sums and products wrap around anyway.
    """
    wide = accumulator(lhs.dtype)
    if lhs.dtype not in _DOT_OPERANDS:
        lhs, rhs = (lax.convert_element_type(x, wide) for x in (lhs, rhs))
    return lax.dot_general(
        lhs, rhs, (op.contract, op.batch), precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )


def _reduce(op: Reduce, x: jax.Array) -> jax.Array:
    wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
    # From a known start JAX makes a primitive such as reduce_max, by whose rule ties share a derivative equally.
    start = identity(op.monoid, x.dtype).astype(wide)
    total = lax.reduce(x.astype(wide), start, combiner(op.monoid), op.dims)
    return total.astype(x.dtype)


def _scan(op: Scan, x: jax.Array) -> jax.Array:
    wide = accumulator(x.dtype) if kind_of(x.dtype) == "float" else x.dtype
    return getattr(lax, f"cum{op.monoid}")(x.astype(wide), axis=op.dim, reverse=op.reverse).astype(x.dtype)


def _linear_scan(op: LinearScan, factors: jax.Array, terms: jax.Array) -> jax.Array:
    def after(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return lax.associative_scan(after, (factors, terms), reverse=op.reverse, axis=op.dim)[1]


def _sort(op: Sort, *operands: jax.Array) -> jax.Array:
    return lax.sort(operands, dimension=op.dim, is_stable=True, num_keys=op.num_keys)[op.pick]


def _top_k(op: TopK, x: jax.Array) -> jax.Array:
    """Top-k that ignores the signs of 0 and NaN, by which XLA orders them."""
    if kind_of(x.dtype) == "float":
        x = jnp.where(x == 0, jnp.zeros_like(x), jnp.where(x != x, jnp.full_like(x, jnp.nan), x))
    places = lax.top_k(jnp.moveaxis(x, op.dim, -1), op.k)[1]
    return jnp.moveaxis(places, -1, op.dim).astype(jnp.int32)


def _dynamic_slice(op: DynamicSlice, x: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, starts, op.sizes, allow_negative_indices=False)


def _dynamic_update_slice(x: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)


def _take(op: Take, x: jax.Array, indices: jax.Array) -> jax.Array:
    """A take with clamped indices; jnp's own mode "clip" first counts negative indices from the end."""
    places = jnp.clip(indices, 0, x.shape[op.dim] - 1)
    take = jnp.take_along_axis if op.along else jnp.take
    return take(x, places, axis=op.dim, mode="clip")
