"""Moves that read what a body may read beside arrays, and bring it together with data."""

from __future__ import annotations

from tilekern.ir.core import Axis, Value
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, I32, TileType
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact
from tilekern.testing.programs.memory import Counter
from tilekern.testing.programs.uses import Uses


class FactsOfPlaces(Uses):
    """Makes positions of lanes, blocks, extents, and tests of which lanes are inside; data meets them."""

    def use_in_loop(self, index: Value, carry: Value) -> None:
        """Use the index of a loop or its carry, perhaps beside a fact."""
        if not self.upto(2):
            self.fact_of_place()
        super().use_in_loop(index, carry)

    def fact_of_place(self) -> None:
        """What a body may read beside arrays: positions, blocks, extents, which lanes are inside; met by data."""
        value = self._known()
        if value is None:
            return
        data = [v for v in self.scope.values if self.kinds.get(v) == "load" and v.tile.dtype == value.tile.dtype]
        x = self.pick(data[::-1][:6]) if data else self.source(TileType(value.tile.shape, value.tile.dtype))
        fitting = self.coerce(value, x.tile)
        if fitting is None:
            return
        if self.chance(7):
            self.carried(fitting)
            return
        if self.facts[x].error or not self.upto(1):
            self.arithmetically(x, fitting)
        else:
            function = self.pick(facts.COMPARISONS)
            test = self.ew(function, x, fitting) if x.tile.dtype != BOOL else self.ew("and", x, fitting)
            self._selected(test)

    def _known(self) -> Value | None:
        """A fact, as a value of int32 or bool."""
        counter = self.pick(self.counters[::-1]) if self.counters else None
        axis = counter.axis if counter else Axis("none", 1)
        scalar, lanes = TileType((), I32), TileType((axis.block,), I32)
        way = self.upto(6)
        if way == 0:
            return self.emit(Iota(shape=lanes.shape, dtype=I32, dim=0), Fact(axis.block))
        if way == 1:
            return self.constant(TileType((self.pick(self.sizes),), I32))
        if way in (2, 3):
            dims = [n for r in self.inputs for n in r.ref.shape]
            number = axis.block if way == 2 else self.pick([axis.extent, *dims])
            return self.number(number, scalar)
        if counter is None or counter.offset:
            return None
        if way == 4:
            return counter.value
        indices = self.indices(counter)
        return indices if way == 5 else self.ew("lt", indices, self.number(axis.extent, lanes))

    def indices(self, counter: Counter) -> Value:
        """The positions of the lanes of a tile."""
        axis, scalar = counter.axis, TileType((), I32)
        start = self.ew("mul", counter.value, self.number(axis.block, scalar))
        self.facts[start] = Fact(max(1, axis.extent))
        shape = (axis.block,)
        first = self.emit(Broadcast(operands=(start,), shape=shape, dims=()), self.facts[start], visible=False)
        indices = self.ew("add", first, self.emit(Iota(shape=shape, dtype=I32, dim=0), Fact(axis.block)))
        self.facts[indices] = Fact(axis.extent + axis.block)
        return indices
