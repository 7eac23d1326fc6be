"""Control: `Fold` over the tiles of an axis, `While`, and `Switch` between blocks."""

from __future__ import annotations

from typing import ClassVar

from tilekern.ir.core import Axis, Block, Op, Value, require
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, INDEX, TileType, Type


def _types(values: tuple[Value, ...]) -> tuple[Type, ...]:
    return tuple(v.type for v in values)


@record(eq=False, kw_only=True)
class Fold(Op):
    """Run the region for tile after tile of `axis`, passing carries along; the results are the last carries.

    Operands: `start` and `stop` (int32 scalars, in elements, clamped to [0, extent]), then the initial carries. The
    tiles t with start // block <= t < cdiv(stop, block) run whole, in descending order if `reverse`. If start and stop
    are the same element inside of a tile, it runs (`lang.serial` gives an empty range the stop 0, and partial tiles
    masks). The region's arguments are t and the carries; it yields the next carries.
    """

    name: ClassVar[str] = "fold"
    pure: ClassVar[bool] = False

    axis: Axis
    reverse: bool = False

    @property
    def start(self) -> Value:
        """The first element."""
        return self.operands[0]

    @property
    def stop(self) -> Value:
        """The element behind the last element."""
        return self.operands[1]

    @property
    def inits(self) -> tuple[Value, ...]:
        """The initial carries."""
        return self.operands[2:]

    @property
    def body(self) -> Block:
        """The block that runs for each tile."""
        return self.regions[0]

    def infer(self) -> tuple[TileType, ...]:
        require(len(self.regions) == 1, "a fold has one region")
        require(_types(self.operands[:2]) == (INDEX, INDEX), "fold bounds must be int32 scalars")
        require(self.axis.block > 0 and self.axis.extent >= 0, f"fold over {self.axis}")
        require(self.axis.extent + self.axis.block <= 2**31, f"the bounds of a fold are int32: {self.axis}")
        carries = tuple(v.tile for v in self.inits)
        require(_types(self.body.args) == (INDEX, *carries), "a fold's arguments must be the index and the carries")
        require(_types(self.body.results) == carries, "a fold must yield carries of the initial types")
        return carries


@record(eq=False, kw_only=True)
class While(Op):
    """While the first region yields true for the carries, the second region computes the next carries."""

    name: ClassVar[str] = "while"
    pure: ClassVar[bool] = False

    @property
    def condition(self) -> Block:
        """The region that maps the carries to one bool scalar."""
        return self.regions[0]

    @property
    def body(self) -> Block:
        """The region that maps the carries to the next carries."""
        return self.regions[1]

    def infer(self) -> tuple[TileType, ...]:
        carries = self.tiles()
        require(len(self.regions) == 2, "a while has two regions")
        for region in self.regions:
            require(_types(region.args) == carries, "the arguments of a while's regions must be the carries")
        require(_types(self.condition.results) == (TileType((), BOOL),), "a while's condition must yield one bool")
        require(_types(self.body.results) == carries, "a while must yield carries of the initial types")
        return carries


@record(eq=False, kw_only=True)
class Switch(Op):
    """Run region number `operands[0]` (int32, clamped to the last region); the results are what the region yields."""

    name: ClassVar[str] = "switch"
    pure: ClassVar[bool] = False

    def infer(self) -> tuple[TileType, ...]:
        require(_types(self.operands) == (INDEX,), "a switch takes one int32 scalar")
        require(len(self.regions) > 0, "a switch needs a region")
        yielded = [tuple(v.tile for v in region.results) for region in self.regions]
        require(all(y == yielded[0] for y in yielded), "all regions of a switch must yield the same types")
        require(not any(region.args for region in self.regions), "regions of a switch take no arguments")
        return yielded[0]


@record(eq=False, kw_only=True)
class Hoist(Switch):
    """A switch with one region, whose results depend on grid indices and inputs only.

    A backend may compute it for the whole grid beforehand, and give programs a table.
    """

    name: ClassVar[str] = "hoist"

    def infer(self) -> tuple[TileType, ...]:
        require(len(self.regions) == 1, "a hoist has one region")
        return super().infer()
