"""Ops for finding faults: `Print` and `Assert`. How often and in which order they run is up to the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilekern.ir.core import Op, require
from tilekern.ir.types import BOOL, TileType


@dataclass(frozen=True, eq=False, kw_only=True)
class Print(Op):
    """Print the operands in a format of `str.format`."""

    name: ClassVar[str] = "print"
    pure: ClassVar[bool] = False

    format: str

    def infer(self) -> tuple[TileType, ...]:
        self.tiles()
        return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Assert(Op):
    """Stop with `message` unless every element of the operand, a bool tile, holds."""

    name: ClassVar[str] = "assert"
    pure: ClassVar[bool] = False

    message: str

    def infer(self) -> tuple[TileType, ...]:
        (predicate,) = self.tiles(1)
        require(predicate.dtype == BOOL, f"assert takes a bool, got {predicate}")
        return ()
