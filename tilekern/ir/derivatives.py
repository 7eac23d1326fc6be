"""Ops that mean something to derivatives alone: `remove_derivatives` takes them out before any backend sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilekern.ir.core import Array, Op, require
from tilekern.ir.types import TileType, kind_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Stop(Op):
    """The operand, of floats, as a constant of differentiation: `jax.lax.stop_gradient`."""

    name: ClassVar[str] = "stop_gradient"

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(kind_of(tile.dtype) == "float", f"stop_gradient does not accept {tile}")
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0]
