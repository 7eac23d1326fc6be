"""Random programs with what `Generator` leaves out: assertions and prints anywhere, carries that alternate."""

from __future__ import annotations

from typing import ClassVar

from tilekern.ir.compute import Select
from tilekern.ir.core import Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, I32, INDEX, TileType, kind_of
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.facts import Fact, union


class Wild(Generator):
    """Makes Funcs."""

    MOVES: ClassVar[dict[str, tuple[str, ...]]] = {
        **Generator.MOVES,
        "debug": ("claim", "say"),
        "live": ("live",) * 4,
        "monoids": ("bits",) * 2,
    }

    def claim(self) -> None:
        """An assertion that holds."""
        if self.hoisting:
            return
        x = self.value(TileType(self.shape(2), I32))
        self.builder.add(Assert(operands=(self.ew("eq", x, x),), message="a number is itself"))

    def say(self) -> None:
        """A print of a scalar."""
        if self.hoisting:
            return
        x = self.value(TileType((), I32))
        self.use((x,))
        self.builder.add(Print(operands=(x,), format="x = {}"))

    def live(self) -> None:
        """A select by the lanes of a tile that lie in the range of a fold around, as the language masks them."""
        if not self.folds or self.hoisting:
            return
        counter, start, stop = self.pick(self.folds[::-1])
        block = counter.axis.block
        origin = self.ew("mul", counter.value, self.number(block, INDEX))
        bound, function = self.pick([(stop, "lt"), (start, "ge")])
        lanes = self.emit(Iota(shape=(block,), dtype=I32, dim=0), Fact(block), visible=False)
        bounds = Broadcast(operands=(self.ew("sub", bound, origin),), shape=(block,), dims=())
        which = self.ew(function, lanes, self.emit(bounds, Fact(2**31 - 1), visible=False))
        x, y = (self.value(TileType((block,), I32)) for _ in range(2))
        self.emit(Select(operands=(which, x, y)), union(*self.fact(x, y)))

    def bits(self) -> None:
        """A reduction of comparisons, or of a few elements, by any monoid but a sum."""
        x = self.value(TileType(self.shape(2), self.pick([BOOL, I32])))
        dims = tuple(d for d in range(len(x.tile.shape)) if self.upto(1))
        self.reduced(x, dims, self.pick(["and", "or", "max", "min"]))

    def _next(self, arg: Value, init: Value, length: int) -> Value:
        """The next carry: for integers sometimes a difference, whose sign depends on the number of iterations."""
        if kind_of(arg.tile.dtype) in ("signed", "unsigned") and arg.tile.dtype != BOOL and self.chance(3):
            return self.ew("sub", self.value(arg.tile), arg)
        return super()._next(arg, init, length)
