"""Separate index vectors that index pointwise: keep one vector, load the other dims whole, and select the lanes.

    load x[gather r, along c]            →  max(select(iota = c, load x[gather r, :], -inf))        along the columns
    store v to x[gather r, along c]      →  store v to x[gather r, :]  mask iota = c
    load x[gather i + iota, along c]     →  the same with x[i +: n, :], which takes no gather

For each lane a whole row is read, or read and written. Writes to the same row are made one after the other, so several
lanes may update one row.

Needs: a canonical Func. Gives: a Func whose index vectors are orthogonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.analysis.ranges import Interval, analyze, update
from tilekern.ir.compute import Monoid, Reduce, identity
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Dim, Load, MemoryOp, Position, Term
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import BOOL
from tilekern.lower.mosaic.legalize.places import fits_int32, inside, places, with_dims


def separate_index_vectors(func: Func) -> Func:
    """Apply the rewrites above.

    Raises:
      TargetError: the position of a lane may not fit int32.
    """
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, MemoryOp) or not op.access.pointwise:
            return None
        apart = _Apart(op, rewriter, ranges)
        return [apart.load(op)] if isinstance(op, Load) else apart.write()

    return Rewriter(rule).run(func)


class _Apart:
    """The rewrite of one access.

    Attributes:
      stays: for each dim of the tile, the array's dim that keeps its index vector.
      chosen: the array's dims that are loaded whole, each with the dim of the tile whose lanes select along it.
    """

    def __init__(self, op: MemoryOp, rewriter: Rewriter, ranges: Mapping[Value, Interval]) -> None:
        self._op, self._rewriter, self._ranges = op, rewriter, ranges
        self._make = Make(rewriter, op)
        access = op.access
        self.stays = [self._stays(lane) for lane in range(len(access.shape))]
        self.chosen = {
            n: lane for n, lane in enumerate(access.lanes) if lane is not None and n not in self.stays
        }  # fmt: skip
        dims = [self._dim(n, dim, op.extents[n]) for n, dim in enumerate(access.dims)]
        self.access, self._positions = with_dims(op, dims)
        self._places = {n: self._place(n) for n in self.chosen}

    def load(self, op: Load) -> Value:
        """The result of a load."""
        make, old = self._make, op.result.tile
        masks = (op.mask,) if op.mask is not None else ()
        fills = (op.fill,) if op.fill is not None else ()
        operands = (op.ref, *self._positions, *fills)
        rows = self._rewriter.one(replace(op, operands=operands, access=self.access, masked=False))
        neutral = make.constant(identity(self._monoid, old.dtype), rows.tile)
        lines = tuple(lane for n, lane in enumerate(self.access.lanes) if n in self.chosen and lane is not None)
        tile = make.add(Reduce, make.select(self._here(), rows, neutral), monoid=self._monoid, dims=lines)
        order = sorted(range(len(self.stays)), key=self.stays.__getitem__)
        tile = make.transpose(tile, tuple(order.index(lane) for lane in range(len(order))))
        for condition in (*masks, *(self._inside(n, old.shape) for n in self.chosen)):
            fill = make.broadcast(op.fill, old.shape, ()) if op.fill is not None else 0
            tile = make.select(condition, tile, fill)
        return tile

    def write(self) -> Sequence[Value]:
        """The write, masked to the selected places; lanes out of bounds select none."""
        op = self._op
        here = self._here()
        if op.mask is not None:
            here = self._make.of("and", here, self._spread(op.mask))
        operands = (op.ref, self._spread(op.operands[1]), *self._positions, here)
        return self._rewriter.add(replace(op, operands=operands, access=self.access, masked=True))

    @property
    def _monoid(self) -> Monoid:
        return "or" if self._op.ref.ref.dtype == BOOL else "max"

    # --- the dims that keep their index vectors ---

    def _stays(self, lane: int) -> int:
        """The array's dim, among those of `lane`, to keep its index vector: one of consecutive elements, if any."""
        members = [n for n, dim_of_tile in enumerate(self._op.access.lanes) if dim_of_tile == lane]
        return next((n for n in members if self._is_block(n)), members[0])

    def _is_block(self, number: int) -> bool:
        return self._counter(self._op.access.dims[number]) is not None

    def _counter(self, dim: Dim) -> Term | None:
        """The term of a gather that is the index of the lane, if any; its lanes are consecutive elements."""
        for term in dim.position.terms:
            index = self._rewriter.definition(self._op.positions[term.operand])
            if isinstance(index, Iota) and len(index.shape) == 1 and term.plain and term.stride == 1:
                return term
        return None

    def _dim(self, number: int, dim: Dim, length: int) -> Dim:
        if number in self.chosen:
            return Dim("block", Position(), length, in_bounds=True)
        shared = dim.kind == "along" or list(self._op.access.lanes).count(self._op.access.lanes[number]) > 1
        if dim.kind in ("index", "block") or not shared:
            return dim
        counter = self._counter(dim)
        if counter is None:
            return replace(dim, kind="gather")
        starts = tuple(term for term in dim.position.terms if term is not counter)
        return replace(dim, kind="block", position=replace(dim.position, terms=starts))

    # --- places ---

    def _place(self, number: int) -> Value:
        """The positions of all lanes along a dim, int32, exact or out of bounds."""
        op, dim = self._op, self._op.access.dims[number]
        if not fits_int32(op, number, self._ranges):
            raise self._too_far(dim, op.extents[number])
        return places(self._make, dim, op.positions, (dim.size,))

    def _too_far(self, dim: Dim, length: int) -> TargetError:
        with source.at(self._op.loc):
            return TargetError(
                f"an index of {self._op.ref.name} may not fit int32",
                expected=f"index vectors that go together, of which int32 tells whether they lie in [0, {length})",
                got=f"factors {[term.stride for term in dim.position.terms]}, constant {dim.position.const}",
                fix='clip the index before, e.g. jnp.clip(v, -1, n), or use target="cpu:xla"',
            )

    def _here(self) -> Value:
        """True at the selected places of the new access."""
        make, shape, lanes = self._make, self.access.shape, self.access.lanes
        selected: Value | None = None
        for n, lane in self.chosen.items():
            line, leads = lanes[n], lanes[self.stays[lane]]
            assert line is not None and leads is not None
            here = make.of("eq", make.lanes(shape, line), make.along(self._places[n], shape, leads))
            selected = here if selected is None else make.of("and", selected, here)
        assert selected is not None
        return selected

    def _inside(self, number: int, shape: tuple[int, ...]) -> Value:
        """True in the lanes of the tile that are in bounds along a dim."""
        lanes = inside(self._make, self._places[number], self._op.extents[number])
        return self._make.along(lanes, shape, self.chosen[number])

    def _spread(self, tile: Value) -> Value:
        """A tile of the old access in the shape of the new access: repeated along the dims that are loaded whole."""
        lanes = self.access.lanes
        order = sorted(range(len(self.stays)), key=self.stays.__getitem__)
        places = tuple(lane for lane in (lanes[n] for n in sorted(self.stays)) if lane is not None)
        return self._make.broadcast(self._make.transpose(tile, tuple(order)), self.access.shape, places)
