"""Random programs each of which has one loop, or a chain of loops over one axis, that can be an axis of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Func, Op, Value, index_value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, Position, Term
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import INDEX, RefType, TileType
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.facts import Fact
from tilekern.testing.programs.memory import Counter


class OneLoop(Generator):
    """Makes Funcs: ops without stores, a loop, often with bounds that depend on the grid's indices, and the rest."""

    def top_level(self) -> None:
        self._moves_without(("fold", "hoist", "store", "read_back", "overwrite", "partial", "atomic"), 4)
        self._in_loop = True
        self.fold()
        self._moves_without(("fold", "loop", "switch"), 5)

    def _moves_without(self, names: Sequence[str], most: int) -> None:
        every, self._names = self._names, [n for n in self._names if n not in names]
        self.moves(self.upto(most))
        self._names = every

    def position(self, most: int = 8, shape: tuple[int, ...] = ()) -> Value:
        """Here a multiple of a grid index is made of three in four that the ops around a loop want."""
        if shape or not self.grid or self.depth or not self.upto(3):
            return super().position(most, shape)
        counter = self.pick(self.grid)
        step = self.pick([1, counter.axis.block, 2, 4])
        product = self.ew("mul", counter.value, self.number(step, INDEX))
        self.facts[product] = Fact(max(1, counter.axis.tiles) * step)
        return product


class OfSteps(OneLoop):
    """Makes Funcs whose loop adds up all tiles of an array, in a grid of two tiles or more.

    Its tiles can be fetched by a pipeline, or by steps of the grid. `in_two` cuts the loop where the grid's first index
    says, so then steps come from a table.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not self.axes:
            self.axes = (self.axis("i"),)
            self.grid = self.free = (Counter(index_value("i"), self.axes[0]),)
            self.counters, self.repeats = list(self.free), self.axes[0].tiles
        self._names = ["elementwise", "select", "convert", "load", "reduce"]

    def axis(self, name: str) -> Axis:
        axis = super().axis(name)
        return replace(axis, extent=max(axis.extent, axis.block + 1))

    def top_level(self) -> None:
        self.moves(1 + self.upto(3))
        self._sum()
        self.moves(1 + self.upto(3))

    def _sum(self) -> None:
        axis, index, length = self.axis("k0"), index_value("k0"), self.pick(self.sizes)
        array = Value(RefType((axis.extent, length), INDEX.dtype, "in"), f"x{len(self.inputs)}")
        self.inputs.append(array)
        self.facts[array] = self._given(INDEX.dtype)
        rows, columns = Dim("block", Position((Term(0, axis.block),)), axis.block), Dim("block", Position(), length)
        start, stop = self.number(0, INDEX), self.number(axis.extent, INDEX)
        inits, facts = self._inits(axis.tiles, self.value(TileType((length,), INDEX.dtype)))
        carry = Value(inits[0].type, "c")

        def yields() -> list[Value]:
            tile = self._read(array, Access((rows, columns)), (index,))
            addend = self.reduced(tile, (0,), "sum")
            assert addend is not None
            return [self.ew("add", carry, addend)]

        body = self.region([index, carry], [Fact(axis.tiles), *facts], [Counter(index, axis)], yields)
        operands = (start, stop, *inits)
        (total,) = self.builder.add(Fold(operands=operands, regions=(body,), axis=axis, reverse=bool(self.upto(1))))
        self._define([total], facts)
        self.store_value(total)


def in_two(func: Func) -> Func:
    """fold [start, stop) at the top → fold [start, middle), fold [middle, stop), both in multiples of the block.

    The middle depends on the first axis of the grid.
    """

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Fold) or op not in func.body.ops or op.axis.tiles == 0:
            return None
        return _cut(op, func, rewriter)

    return Rewriter(rule).run(func)


def _cut(op: Fold, func: Func, rewriter: Rewriter) -> Sequence[Value]:
    block, extent = op.axis.block, op.axis.extent

    def ew(function: str, *operands: Value | int) -> Value:
        values = [v if isinstance(v, Value) else constant(v) for v in operands]
        return rewriter.add(Elementwise(operands=tuple(values), function=function))[0]

    def constant(number: int) -> Value:
        return rewriter.add(Constant(operands=(), array=INDEX.dtype.type(number), shape=()))[0]

    def aligned(position: Value, up: int) -> Value:
        inside = ew("min", ew("max", position, 0), extent)
        return ew("mul", ew("div", ew("add", inside, up), block), block)

    tile = ew("min", func.body.args[0], op.axis.tiles - 1) if func.body.args else constant(op.axis.tiles // 2)
    middle = ew("min", ew("max", ew("mul", tile, block), aligned(op.start, 0)), aligned(op.stop, block - 1))
    halves = [(op.start, middle), (middle, op.stop)]
    carries: Sequence[Value] = op.inits
    for start, stop in reversed(halves) if op.reverse else halves:
        body = Cloner().copy_block(op.body)
        carries = rewriter.add(replace(op, operands=(start, stop, *carries), regions=(body,)))
    return carries
