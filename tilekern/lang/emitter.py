"""IR builder for the import rules of JAX's primitives, and the type of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from tilekern._jax import JaxprEqn
from tilekern.ir.compute import Convert, splat
from tilekern.ir.core import Builder, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import FOUR_BITS, DType, TileType
from tilekern.source import UNKNOWN, Loc


class Emitter(Builder):
    """Builder of ops that adds the user's line, and broadcasts as JAX does implicitly."""

    def __init__(self) -> None:
        super().__init__()
        self.loc: Loc = UNKNOWN

    def op(self, kind: Callable[..., Op], *operands: Value, **attributes: Any) -> Value:
        """Append an op at the user's line, and return its result."""
        plain = {name: _plain(value) for name, value in attributes.items()}
        return self.one(kind(operands=operands, loc=self.loc, **plain))

    def elementwise(self, function: str, *operands: Value) -> Value:
        """Append an elementwise op whose operands are first broadcast to one shape."""
        return self.op(Elementwise, *self.broadcast(*operands), function=function)

    def broadcast(self, *operands: Value) -> list[Value]:
        """Broadcast operands to one shape: scalars and dims of size 1 are repeated, as JAX does implicitly."""
        shapes = [v.tile.shape for v in operands]
        rank = max(map(len, shapes))
        whole = [shape for shape in shapes if len(shape) == rank]
        shape = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*whole, strict=True))
        return [self.broadcast_to(v, shape) for v in operands]

    def broadcast_to(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Broadcast a scalar, or a tile of the same rank, to `shape`."""
        if value.tile.shape == shape:
            return value
        return self.op(Broadcast, value, shape=shape, dims=tuple(range(len(value.tile.shape))))

    def convert(self, value: Value, dtype: DType) -> Value:
        """Cast to another dtype; no op if the dtype is right already."""
        return value if value.tile.dtype == dtype else self.op(Convert, value, dtype=dtype)

    def splat(self, number: Any, like: TileType) -> Value:
        """Constant tile of one number."""
        return self.one(splat(number, like, loc=self.loc))


def _plain(value: Any) -> Any:
    """The attribute with Python ints in the place of NumPy integers, in tuples too: (np.int64(3), "a") → (3, "a").

    Parameters of JAX's equations may hold NumPy integers.
    """
    if isinstance(value, tuple):
        return tuple(map(_plain, cast(tuple[Any, ...], value)))
    return int(cast(Any, value)) if isinstance(value, np.integer) else value


Rule = Callable[[Emitter, JaxprEqn, list[Value]], Value | list[Value]]
"""Makes the results of an equation from its operands."""


def aval(eqn: JaxprEqn) -> TileType:
    """Type of the first result of an equation."""
    return type_of(eqn.outvars[0])


def type_of(var: Any) -> TileType:
    """Type of a variable of a jaxpr. 4-bit numbers are held in a wider dtype."""
    dtype = np.dtype(var.aval.dtype)
    return TileType(tuple(var.aval.shape), FOUR_BITS.get(dtype, dtype))
