"""Ops for derivatives alone: `remove_derivatives` removes them before a backend sees a Func."""

from __future__ import annotations

from typing import ClassVar

from tilekern.ir.core import Array, Block, Op, require
from tilekern.ir.records import record
from tilekern.ir.types import TileType, kind_of


@record(eq=False, kw_only=True)
class Stop(Op):
    """The operand, of floats, as a constant of differentiation: `jax.lax.stop_gradient`."""

    name: ClassVar[str] = "stop_gradient"

    def infer(self) -> tuple[TileType, ...]:
        (tile,) = self.tiles(1)
        require(kind_of(tile.dtype) == "float", f"stop_gradient does not accept {tile}")
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0]


@record(eq=False, kw_only=True)
class Custom(Op):
    """The first operand, of floats, with a derivative that the user states: `jax.custom_jvp`.

    The first operand is computed from stops of the other operands, so that its own ops have no part in derivatives.
    `rule` computes the tangent of the result. Its arguments are the operands, with the result in the place of the first
    operand, then the tangents of the other float operands, of their dtypes. It uses no other values. Without a rule,
    the result has no derivative, and `reason` says why.
    """

    name: ClassVar[str] = "custom_derivative"

    rule: Block | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.regions:  # the text form shows the rule as a region, but no program runs it
            require(self.rule is None and len(self.regions) == 1, "a custom_derivative has one rule")
            object.__setattr__(self, "rule", self.regions[0])
            object.__setattr__(self, "regions", ())
        super().__post_init__()

    @property
    def moving(self) -> tuple[int, ...]:
        """The numbers of the operands whose tangents the rule takes."""
        return tuple(n for n, v in enumerate(self.operands) if n > 0 and kind_of(v.tile.dtype) == "float")

    def infer(self) -> tuple[TileType, ...]:
        tile, *_ = tiles = self.tiles()
        require(kind_of(tile.dtype) == "float", f"custom_derivative does not accept {tile}")
        if self.rule is not None:
            require(isinstance(self.rule, Block), "the rule of a custom_derivative is a block")  # pyright: ignore[reportUnnecessaryIsInstance] -- a text may say anything
            expected = (*tiles, *(tiles[n] for n in self.moving))
            require(tuple(a.type for a in self.rule.args) == expected, "a rule takes the operands, and their tangents")
            require(tuple(r.type for r in self.rule.results) == (tile,), "a rule yields the tangent of the result")
            require(_is_closed(self.rule), "a rule uses its arguments alone")
        return (tile,)

    def evaluate(self, *operands: Array) -> Array:
        return operands[0]


def _is_closed(block: Block) -> bool:
    """True if a block uses no value, and so no array, from outside."""
    defined = {*block.args, *(r for op in block.walk() for r in op.results)}
    defined.update(a for op in block.walk() for region in op.regions for a in region.args)
    return all(defined.issuperset(op.uses()) for op in block.ops) and defined.issuperset(block.results)
