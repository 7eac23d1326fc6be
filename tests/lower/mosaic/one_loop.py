"""Random programs each of which has one loop, or a chain of loops over one axis, that can be an axis of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import INDEX
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.facts import Fact


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
