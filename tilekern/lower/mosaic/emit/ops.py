"""JAX functions of the pure ops of a legal Func, for the body of a Pallas kernel.

Outside of a kernel the functions compute the same results.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tilekern.ir.compute import Constant, Convert, Dot, Reduce
from tilekern.ir.core import Op
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.shape import Reshape, Slice
from tilekern.ir.types import BOOL, F32, I32, TileType, accumulator
from tilekern.lower.jax_ops import Function, shared_function
from tilekern.lower.mosaic.chip import LANES, SUBLANES

# exp(87) is 6e37; beyond 8.5e37 a reciprocal is no normal float32.
_MOST_EXPONENT = 87.0

_PRECISION = {
    "ieee": lax.Precision.HIGHEST,
    "bf16x6": lax.Precision.HIGHEST,
    "bf16x3": lax.Precision.HIGH,
    "tf32": lax.Precision.HIGH,
    "bf16": lax.Precision.DEFAULT,
}


def function_of(op: Op, interpreted: bool = False) -> Function:
    """The function of a legal op's operands that computes its result.

    Vectors may have either form, or the shape of the IR; all other operands have the shape of the IR.

    Args:
      op: the op.
      interpreted: True if XLA's CPU backend runs the function, which lacks some products.
    """
    match op:
        case Constant():
            return partial(_constant, op)
        case Convert():
            return partial(_convert, op)
        case Dot():
            return partial(_dot, op, interpreted)
        case Reduce():
            return partial(getattr(jnp, op.monoid), axis=op.dims)
        case Take():
            return partial(jnp.take_along_axis, axis=op.dim, mode="promise_in_bounds")
        case Reshape(shape=()):
            return _only
        case Slice(operands=(x,)) if _is_rolled(op, x.tile):
            return partial(_rolled, op)
        case Elementwise(function="logistic"):
            return _logistic
        case _:
            function = shared_function(op)
            if function is None:
                raise NotImplementedError(f"the Mosaic backend has no rule for {op.name}")
            return function


def _constant(op: Constant) -> jax.Array:
    """A constant with one element; constants with several elements are inputs of the kernel."""
    assert op.array.size == 1, f"a constant of {op.array.size} elements in a kernel's body"
    return jnp.full(op.shape, op.array.reshape(-1)[0], op.array.dtype)


def _convert(op: Convert, x: jax.Array) -> jax.Array:
    """A legal cast; legalisation has already clamped the values that its result cannot represent."""
    assert op.dtype != BOOL, "a cast to bool"
    return lax.convert_element_type(x, op.dtype)


def _is_rolled(op: Slice, tile: TileType) -> bool:
    """True if a slice has the size of whole registers, and starts within one, along one dim."""
    if tile.dtype not in (F32, I32) or len(tile.shape) != 2:
        return False
    odd = [d for d, unit in enumerate((SUBLANES, LANES)) if op.start[d] % unit]
    whole = all(n % unit == 0 for n, unit in zip(tile.shape, (SUBLANES, LANES), strict=True))
    return len(odd) == 1 and whole and op.result.tile.shape[odd[0]] % (SUBLANES, LANES)[odd[0]] == 0


def _rolled(op: Slice, x: jax.Array) -> jax.Array:
    """The slice of a rotated tile, aligned to registers; otherwise each use of the slice would shift it again."""
    (dim,) = (d for d, unit in enumerate((SUBLANES, LANES)) if op.start[d] % unit)
    starts, stops = list(op.start), list(op.stop)
    moved = pltpu.roll(x, x.shape[dim] - starts[dim], dim)
    starts[dim], stops[dim] = 0, stops[dim] - starts[dim]
    return lax.slice(moved, starts, stops)


def _logistic(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), with exp(-x) held where its reciprocal is still a normal number; beyond, the result is 0.

    So the reciprocal needs no care for infinities, which would take as long as the rest of the function.
    """
    below: jax.Array = 1 + jnp.exp(jnp.minimum(-x, _MOST_EXPONENT))
    reciprocal = cast(jax.Array, pltpu.reciprocal(below, full_range=False))
    return jnp.where(x < -_MOST_EXPONENT, 0.0, reciprocal)


def _only(x: jax.Array) -> jax.Array:
    """The element of a tile with one element."""
    return x[(0,) * x.ndim]


def _dot(op: Dot, interpreted: bool, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    wide = accumulator(lhs.dtype)
    precision = _PRECISION[op.precision] if lhs.dtype == jnp.float32 else None
    if interpreted and lhs.dtype == jnp.bfloat16:
        # XLA's CPU backend lacks some products of bfloat16, which are exact in float32 ("Unsupported element type for
        # DotThunk", jaxlib 0.12.0).
        lhs, rhs, precision = lhs.astype(wide), rhs.astype(wide), lax.Precision.HIGHEST
    return lax.dot_general(lhs, rhs, (op.contract, op.batch), precision=precision, preferred_element_type=wide)
