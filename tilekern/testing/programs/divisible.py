"""Random programs whose first axis devices may divide: arrays follow it along their first dim, or not at all.

Now and then an array is read elsewhere, too, or positions are compared with another number than the extent: devices may
not divide such a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from tilekern.ir.core import Axis, Value
from tilekern.ir.memory import Access, Dim, Position, Term
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import RefType, TileType, kind_of
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.memory import Counter
from tilekern.testing.programs.values import LARGEST


class Divisible(Generator):
    """Makes Funcs. No op computes with the index of the first axis, but comparisons of the positions of lanes."""

    MOVES: ClassVar[dict[str, tuple[str, ...]]] = {
        **Generator.MOVES,
        "uses": (*Generator.MOVES["uses"], "summed", "summed"),
    }

    def __init__(self, *arguments: Any) -> None:
        self._following: set[Value] = set()
        super().__init__(*arguments)
        self.free = self.grid[1:]
        self.counters = list(self.free)

    def axis(self, name: str) -> Axis:
        """The first axis has an even extent: two devices may divide it, or more."""
        axis = super().axis(name)
        return replace(axis, extent=axis.extent + axis.extent % 2) if name == "i" else axis

    def _input(self, name: str) -> Value:
        """An array; the first one and most others follow the first axis."""
        value = super()._input(name)
        if not self.grid or (self._following and self.chance(2)):
            return value
        value = Value(RefType((self.axes[0].extent, *value.ref.shape[1:]), value.ref.dtype, "in"), name)
        self.facts[value] = self._given(value.ref.dtype)
        self._following.add(value)
        return value

    def _load(self, ref: Value, shape: tuple[int, ...] | None) -> Value:
        """The program's own tile of an array that follows; seldom, and of others, anything."""
        if ref not in self._following or self.chance(15):
            return super()._load(ref, shape)
        axis = self.axes[0]
        sizes_behind = (*(shape or ())[1:], *[None] * len(ref.ref.shape))
        if shape is not None and (shape[:1] != (axis.block,) or len(shape) > len(ref.ref.shape)):
            return self.constant(TileType(shape, ref.ref.dtype))
        operands = [self.grid[0].value]
        dims = [Dim("block", Position((Term(0, axis.block),)), axis.block)]
        for length, size in zip(ref.ref.shape[1:], sizes_behind, strict=False):
            sizes = None if shape is None else (size,)
            dims.append(self._dim(length, operands, sizes))
        if prod(d.size for d in dims) > LARGEST:
            operands, others = operands[:1], len(dims) - 1
            dims = [dims[0], *[Dim("index", Position())] * others]
        return self._read(ref, Access(tuple(dims)), tuple(operands))

    def _addressed(self, x: Value) -> Value | None:
        """A load of an array that does not follow."""
        all_inputs = self.inputs
        self.inputs = [ref for ref in all_inputs if ref not in self._following]
        value = super()._addressed(x) if self.inputs else None
        self.inputs = all_inputs
        return value

    def summed(self) -> None:
        """Add a sum over the lanes of a tile, or of a function of the tile, to a sum of all programs."""
        x = self.any("float")
        if kind_of(x.tile.dtype) != "float" or self.hoisting:
            return
        x = x if self.upto(1) else self._smoothed(x) or x
        total = self.reduced(x, tuple(range(len(x.tile.shape))), self.pick(["sum", "sum", "max"]))
        if total is not None:
            self.updated(total)

    def top_level(self) -> None:
        """Read an array that follows first."""
        for ref in self.inputs[:1]:
            self._load(ref, None)
        super().top_level()

    def store_value(self, value: Value) -> None:
        """Store a value to tiles of the first axis. A value without a dim of this axis is repeated along it."""
        shape = value.tile.shape
        if self.grid and self.axes[0].block not in shape and value.tile.size * self.axes[0].block <= LARGEST:
            op = Broadcast(operands=(value,), shape=(self.axes[0].block, *shape), dims=tuple(range(1, len(shape) + 1)))
            value = self.emit(op, self.facts[value])
        super().store_value(value)

    def _along(self, counters: Sequence[Counter], size: int) -> Counter | None:
        """The first axis, if its tiles fit a dim."""
        first = [c for c in counters if c in self.grid[:1] and c.axis.block == size]
        return first[0] if first else super()._along(counters, size)

    def _own_tile(self, counter: Counter) -> tuple[Dim, Value]:
        """The tile of an axis, of the first one in order."""
        if counter not in self.grid[:1]:
            return super()._own_tile(counter)
        block = counter.axis.block
        return Dim("block", Position((Term(0, block),)), block), counter.value

    def _own_index(self, counter: Counter) -> list[tuple[int, Dim, Value]]:
        """The dim by which an output counts tiles, of the first axis as a whole."""
        if counter not in self.grid[:1]:
            return super()._own_index(counter)
        return [(counter.axis.tiles, Dim("index", Position((Term(0, 1),))), counter.value)]

    def _known(self) -> Value | None:
        """A fact, which may be of the first axis: a comparison of positions."""
        if not self.grid or self.upto(2):
            return super()._known()
        before, (counter, *_) = len(self.scope.values), self.grid
        lanes = self.indices(counter)
        limits = [counter.axis.extent] * 4 + [0, counter.axis.block, *self.inputs[0].ref.shape[-1:]]
        test = self.ew(self.pick(["lt", "lt", "ge"]), lanes, self.number(self.pick(limits), lanes.tile))
        self.scope.values[before:] = [test]
        return test
