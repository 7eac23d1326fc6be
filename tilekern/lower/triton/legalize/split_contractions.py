"""Split dots of loads into parts whose contracted size is a power of two.

Needs: a verified Func, before `pad_tiles`. Gives: a Func with the same outputs, up to the order of additions.

    x = load a[.., p +: 192]; y = load b[p +: 192, ..]; dot(x, y)
        → dot(load a[.., p +: 128], load b[p +: 128, ..]) + dot(load a[.., p + 128 +: 64], load b[p + 128 +: 64, ..])

    a last part of fewer than 16 elements is loaded as 16, with zeros behind them

Otherwise `pad_tiles` would pad the size with zeros, which cost as much as other numbers: 192 become 256. For attention
with d = 192 that takes 262,144 bytes of shared memory, more than a program has; split, it takes 212,992 (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Dim, Load
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Transpose
from tilekern.ir.types import kind_of
from tilekern.lower.triton.legalize.standard_forms import least_depth


def split_contractions(func: Func) -> Func:
    """Apply the rewrite above."""
    return _Splitter(func).run(func)


@record
class _Cut:
    """The split of a dim of a tile: the sizes of its parts, and the loaded size of the last part."""

    dim: int
    sizes: tuple[int, ...]
    last: int


def _cut(dim: int, size: int, least: int) -> _Cut:
    """The cut into powers of two, the largest first; a remainder smaller than `least` is the last part."""
    parts: list[int] = []
    while size >= least:
        parts.append(1 << (size.bit_length() - 1))
        size -= parts[-1]
    return _Cut(dim, (*parts, size), least) if size else _Cut(dim, tuple(parts), parts[-1])


class _Splitter(Rewriter):
    def __init__(self, func: Func) -> None:
        super().__init__(self._rule)
        self._sources = definitions(func)
        self._cuts: dict[Value, _Cut] = {}
        self._parts: dict[Value, list[Value]] = {}
        for op in func.walk():
            if isinstance(op, Dot):
                self._plan(op)

    def _plan(self, op: Dot) -> None:
        """Note the cut of each value between the loads and the dot, if both operands can be cut alike."""
        if len(op.contract[0]) != 1 or kind_of(op.operands[0].tile.dtype) != "float":
            return
        size, least = op.operands[0].tile.shape[op.contract[0][0]], least_depth(op)
        if size == 0 or (size >= least and size & (size - 1) == 0):
            return
        chains = [self._chain(v, dims[0]) for v, dims in zip(op.operands, op.contract, strict=True)]
        if any(chain is None for chain in chains):
            return
        cuts = {value: _cut(dim, size, least) for chain in chains if chain for value, dim in chain}
        if all(self._cuts.get(value, cut) == cut for value, cut in cuts.items()):
            self._cuts.update(cuts)

    def _chain(self, value: Value, dim: int) -> list[tuple[Value, int]] | None:
        """The values from a dot's operand back to its load, each with the contracted dim; None for other operands."""
        chain = [(value, dim)]
        op = self._sources.get(value)
        while isinstance(op, Transpose):
            dim = op.permutation[dim]
            chain.append((op.operands[0], dim))
            op = self._sources.get(op.operands[0])
        if not isinstance(op, Load) or op.masked or op.filled:
            return None
        return chain if _tile_dims(op)[dim][1].kind == "block" else None

    def visit(self, op: Op) -> Sequence[Value]:
        # The keys of the cuts are values of the original Func.
        cut = self._cuts.get(op.results[0]) if len(op.results) == 1 else None
        if isinstance(op, Load) and cut is not None:
            self._parts[op.result] = [self._part(op, cut, n) for n in range(len(cut.sizes))]
        elif isinstance(op, Transpose) and cut is not None:
            parts = self._parts[op.operands[0]]
            self._parts[op.result] = [self.one(op.copy((part,))) for part in parts]
        elif isinstance(op, Dot) and all(v in self._cuts for v in op.operands):
            dims = [self._cuts[v].dim for v in op.operands]
            if dims == [d[0] for d in op.contract]:
                self.replace(op.result, self._sum(op))
                return [self.value(op.result)]
        return super().visit(op)

    def _part(self, op: Load, cut: _Cut, number: int) -> Value:
        place, dim = _tile_dims(op)[cut.dim]
        position = replace(dim.position, const=dim.position.const + sum(cut.sizes[:number]))
        dims = list(op.access.dims)
        size = cut.sizes[number]
        wide = cut.last if number == len(cut.sizes) - 1 else size
        # Parts of a dim in bounds are in bounds, unless they are loaded wider.
        dims[place] = Dim("block", position, wide, dim.in_bounds and wide == size)
        access = replace(op.access, dims=tuple(dims))
        operands = tuple(self.value(v) for v in op.operands)
        reaches_end = not position.terms and position.const + size >= op.extents[place]
        if wide == size or reaches_end:
            return self.one(replace(op, operands=operands, access=access))
        make = Make(self, op)
        inside = make.along(make.of("lt", make.lanes((wide,), 0), size), access.shape, cut.dim)
        return self.one(replace(op, operands=(*operands, inside), access=access, masked=True))

    def _sum(self, op: Dot) -> Value:
        total: Value | None = None
        for pair in zip(*(self._parts[v] for v in op.operands), strict=True):
            product = self.one(op.copy(tuple(pair)))
            if total is not None:
                product = self.one(Elementwise(operands=(total, product), function="add", loc=op.loc))
            total = product
        assert total is not None
        return total

    def _rule(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        return None


def _tile_dims(op: Load) -> list[tuple[int, Dim]]:
    """For each dim of the loaded tile, the array's dim: its number, and its part of the access."""
    return [(n, op.access.dims[n]) for n in op.access.kept]
