"""The pure ops of a legal Func as functions for the body of a Pallas kernel, where Mosaic compiles them.

They are plain JAX, too: outside of Mosaic they give what the ops mean.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tilekern.ir.compute import Constant, Convert, Dot, Reduce
from tilekern.ir.core import Op
from tilekern.ir.dynamic import Take
from tilekern.ir.shape import Reshape, Slice
from tilekern.ir.types import BOOL, F32, I32, TileType, accumulator
from tilekern.lower.jax_ops import Function, shared_function
from tilekern.lower.mosaic.chip import LANES, SUBLANES

_PRECISION = {
    "ieee": lax.Precision.HIGHEST,
    "bf16x6": lax.Precision.HIGHEST,
    "bf16x3": lax.Precision.HIGH,
    "tf32": lax.Precision.HIGH,
}


def function_of(op: Op) -> Function:
    """The function of a legal op's operands that computes its result.

    Tiles of rank 2 and more, and scalars, come as they are; vectors in any shape in which the emitter has them.
    """
    match op:
        case Constant():
            return partial(_constant, op)
        case Convert():
            return partial(_convert, op)
        case Dot():
            return partial(_dot, op)
        case Reduce():
            return partial(getattr(jnp, op.monoid), axis=op.dims)
        case Take():
            return partial(jnp.take_along_axis, axis=op.dim, mode="promise_in_bounds")
        case Reshape(shape=()):
            return _only
        case Slice(operands=(x,)) if _is_rolled(op, x.tile):
            return partial(_rolled, op)
        case _:
            function = shared_function(op)
            if function is None:
                raise NotImplementedError(f"the Mosaic backend has no rule for {op.name}")
            return function


def _constant(op: Constant) -> jax.Array:
    """A splat; the emitter takes arrays of several elements as inputs."""
    assert op.array.size == 1, f"a constant of {op.array.size} elements in a kernel's body"
    return jnp.full(op.shape, op.array.reshape(-1)[0], op.array.dtype)


def _convert(op: Convert, x: jax.Array) -> jax.Array:
    """Legal casts need no care: what the result cannot hold is gone before."""
    assert op.dtype != BOOL, "a cast to bool"
    return lax.convert_element_type(x, op.dtype)


def _is_rolled(op: Slice, tile: TileType) -> bool:
    """True if whole registers are cut out from between registers, along one dim."""
    if tile.dtype not in (F32, I32) or len(tile.shape) != 2:
        return False
    odd = [d for d, unit in enumerate((SUBLANES, LANES)) if op.start[d] % unit]
    whole = all(n % unit == 0 for n, unit in zip(tile.shape, (SUBLANES, LANES), strict=True))
    return len(odd) == 1 and whole and op.result.tile.shape[odd[0]] % (SUBLANES, LANES)[odd[0]] == 0


def _rolled(op: Slice, x: jax.Array) -> jax.Array:
    """The slice, moved to the front first: of values that start within registers, each use would move them again."""
    (dim,) = (d for d, unit in enumerate((SUBLANES, LANES)) if op.start[d] % unit)
    starts, stops = list(op.start), list(op.stop)
    moved = pltpu.roll(x, x.shape[dim] - starts[dim], dim)
    starts[dim], stops[dim] = 0, stops[dim] - starts[dim]
    return lax.slice(moved, starts, stops)


def _only(x: jax.Array) -> jax.Array:
    """The element of a tile of one."""
    return x[(0,) * x.ndim]


def _dot(op: Dot, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    precision = _PRECISION[op.precision] if lhs.dtype == jnp.float32 else None
    wide = accumulator(lhs.dtype)
    return lax.dot_general(lhs, rhs, (op.contract, op.batch), precision=precision, preferred_element_type=wide)
