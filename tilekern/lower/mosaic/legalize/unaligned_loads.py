"""Write loads at any position of an input as loads of aligned tiles, and slices of the tiles.

Mosaic fetches and slices blocks only at multiples of the sizes of a register. The halo of a stencil becomes a few more
rows or columns.

Needs: a verified Func. Gives: a Func whose loads of inputs begin, along the last two dims of their tiles, at constants
or at multiples of the sizes of a register. Positions with digits of numbers, sums that may leave int32, and rows of
arrays that may not fit vector memory stay as they are.

    load x[64 i - 1 +: 64]   → (load x[64 i - 8 +: 8] ++ load x[64 i +: 64])[7:71]
    load x[n +: 8]           → (load x[8 (n // 8) +: 8] ++ load x[8 (n // 8) + 8 +: 8])[n % 8 : n % 8 + 8]

Overlapping loads of one input in one block become slices of the same tiles.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from math import gcd
from typing import cast

from tilekern.ir.analysis.ranges import Interval, analyze, position_interval, proved
from tilekern.ir.compute import Constant
from tilekern.ir.core import Block, Func, Op, Value, cdiv
from tilekern.ir.dynamic import DynamicSlice
from tilekern.ir.make import Make
from tilekern.ir.memory import Dim, Load, Position, Term
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter, ScopedRewriter
from tilekern.ir.types import F32, INDEX
from tilekern.lower.mosaic.chip import LANES, SUBLANES, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import packing

Span = tuple[int, int]

_MOST_PIECES = 40
_FAR = 1 << 28  # elements: more than any dim of an array that fits vector memory
_SURELY_FITS = 8 << 20  # bytes of an array that fits the vector memory of every chip beside all other buffers


@record
class _Base:
    """The aligned tiles that are loaded along a dim for a load.

    Attributes:
      terms: the terms of their positions.
      pieces: the constant of each tile's position, and its size.
      ahead: the number of elements of the tiles before the first element of the load.
      ahead_in_program: a further number of such elements, computed by the program; None for 0.
    """

    terms: tuple[Term, ...]
    pieces: tuple[Span, ...]
    ahead: int
    ahead_in_program: Value | None = None


def align_loads(func: Func) -> Func:
    """Apply the rewrites above."""
    plain = _without_zeros(func)
    ranges = analyze(plain)
    spans: dict[Load, Mapping[int, Span]] = {}
    _collect(plain.body, spans, ranges)
    return _Aligner(spans, ranges, frozenset(func.body.args)).run(plain) if spans else func


def _without_zeros(func: Func) -> Func:
    """Drop fills of 0: loads without a fill have it anyway, and loads must be equal to share tiles."""

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        fill = op.fill if isinstance(op, Load) else None
        filling = None if fill is None else rewriter.definition(fill)
        if not isinstance(filling, Constant) or any(filling.array.tobytes()):
            return None
        return rewriter.add(replace(cast(Load, op), operands=op.operands[:-1], filled=False))

    return Rewriter(rule).run(func)


def _collect(block: Block, spans: dict[Load, Mapping[int, Span]], ranges: Mapping[Value, Interval]) -> None:
    """Note the loads to rewrite, and the span of each dim to load for them, relative to the terms of the position."""
    alike: dict[Hashable, list[Load]] = {}
    for op in block.ops:
        for region in op.regions:
            _collect(region, spans, ranges)
        if isinstance(op, Load) and op.ref.ref.role == "in" and 0 not in (*op.extents, *op.access.shape):
            alike.setdefault(_key(op), []).append(op)
    for loads in alike.values():
        for d, unit in _units(loads[0]).items():
            _widen(loads, d, unit, spans, ranges)


def _key(op: Load) -> Hashable:
    """The key of loads that can share tiles: all of the load but the constants of its positions along aligned dims."""
    units = _units(op)
    dims = (_without_constant(d) if n in units else d for n, d in enumerate(op.access.dims))
    return op.ref, op.positions, op.fill, op.access.extents, tuple(replace(d, in_bounds=False) for d in dims)


def _without_constant(dim: Dim) -> Dim:
    return replace(dim, position=replace(dim.position, const=0))


def _units(op: Load) -> dict[int, int]:
    """The dims along the lanes and the rows of registers, each with the elements of a register along it."""
    last = [n for n, d in enumerate(op.access.dims) if d.kind == "block"][-2:]
    return dict(zip(reversed(last), (LANES, packing(op.ref.ref.dtype)), strict=False))


def _widen(
    loads: Sequence[Load], d: int, unit: int, spans: dict[Load, Mapping[int, Span]], ranges: Mapping[Value, Interval]
) -> None:
    """Group loads that overlap along a dim; note the span of each group with an unaligned load."""
    by_place = sorted(loads, key=lambda op: op.access.dims[d].position.const)
    starts = [op.access.dims[d].position.const for op in by_place]
    size = loads[0].access.dims[d].size
    breaks = [0, *(n for n in range(1, len(starts)) if starts[n] - starts[n - 1] >= size), len(starts)]
    for first, end in pairwise(breaks):
        group = by_place[first:end]
        span = starts[first], starts[end - 1] + size
        if not _is_odd(group, d, unit, ranges):
            continue
        for op in group:
            spans[op] = {**spans.get(op, {}), d: span}


def _is_odd(group: Sequence[Load], d: int, unit: int, ranges: Mapping[Value, Interval]) -> bool:
    dims = [op.access.dims[d] for op in group]
    if not _open(dims[0].position, [ranges.get(v) for v in group[0].positions]).terms:
        return len({dim.position.const for dim in dims}) > 1 and any(dim.position.const % unit for dim in dims)
    return not all(dim.position.is_multiple_of(dim.size) for dim in dims)


def _open(position: Position, intervals: Sequence[Interval | None]) -> Position:
    """The position, with terms of known numbers added to the constant."""
    const, terms = position.const, list[Term]()
    for term in position.terms:
        interval = position_interval(Position((term,)), intervals)
        if interval is not None and interval.known:
            const += interval.low
        else:
            terms.append(term)
    return Position(tuple(terms), const)


class _Aligner(ScopedRewriter[Hashable]):
    def __init__(
        self, spans: Mapping[Load, Mapping[int, Span]], ranges: Mapping[Value, Interval], grid: frozenset[Value]
    ) -> None:
        super().__init__(self._align)
        self._spans, self._ranges, self._grid = spans, ranges, grid
        self._origin: Op | None = None

    def visit(self, op: Op) -> Sequence[Value]:
        self._origin = op
        return super().visit(op)

    def _align(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        origin = self._origin
        if not isinstance(op, Load) or not isinstance(origin, Load) or origin not in self._spans:
            return None
        make, places = Make(rewriter, op), _Places(op, origin, self._ranges, self._grid)
        bases = {d: base for d, span in self._spans[origin].items() if (base := places.base(make, d, span))}
        if not bases:
            return None
        dims = tuple(_without_constant(dim) if d in bases else dim for d, dim in enumerate(op.access.dims))
        key = _key(op), dims, tuple((d, base.pieces) for d, base in bases.items())
        if key not in self.known:
            self.known[key] = (places.load(make, op.access.dims, bases),)
        (x,) = self.known[key]
        for d in sorted(bases, reverse=True):
            x = _cut(make, x, op, d, bases[d])
        if op.mask is None:
            return [x]
        fill = make.number(0, x.tile) if op.fill is None else make.broadcast(op.fill, x.tile.shape, ())
        return [make.select(op.mask, x, fill)]


class _Places:
    """The operands of the positions of a load, and of the aligned loads for it."""

    def __init__(self, op: Load, origin: Load, ranges: Mapping[Value, Interval], grid: frozenset[Value]) -> None:
        self._op, self._values, self._grid = op, list(op.positions), grid
        self._intervals = [ranges.get(v) for v in origin.positions]

    def base(self, make: Make, d: int, span: Span) -> _Base | None:
        """The tiles to load along a dim for a span of it; None if their positions cannot be computed."""
        op = self._op
        unit, dim = _units(op)[d], op.access.dims[d]
        opened = _open(dim.position, self._intervals)
        moved = opened.const - dim.position.const
        low, high = span[0] + moved, span[1] + moved
        odd = tuple(t for t in opened.terms if t.stride % unit)
        terms = tuple(t for t in opened.terms if t not in odd)
        if not odd:
            pieces = _pieces(low, high, gcd(*(t.stride for t in terms)), unit)
            return _Base(terms, pieces, opened.const - pieces[0][0])
        if (unit != LANES and not self._is_near(odd, dim.size)) or op.extents[d] > _FAR:
            return None
        number = self._sum(make, odd, Position(terms, opened.const))
        pieces = _pieces(low, high + unit - 1, unit, unit)
        if number is None or len(pieces) > _MOST_PIECES:
            return None
        terms = (*terms, Term(self._number_of(number), unit, unit))
        return _Base(terms, pieces, opened.const - pieces[0][0], make.of("and", number, unit - 1))

    def load(self, make: Make, dims: Sequence[Dim], bases: Mapping[int, _Base]) -> Value:
        """Load the tiles of all dims, and join them."""
        if not bases:
            return self._load(make, dims)
        d = min(bases)
        later_bases = {n: base for n, base in bases.items() if n != d}
        tiles = list[Value]()
        for start, size in bases[d].pieces:
            tile = Dim("block", Position(bases[d].terms, start), size)
            tiles.append(self.load(make, (*dims[:d], tile, *dims[d + 1 :]), later_bases))
        return make.joined(_axis(self._op, d), *tiles)

    def _load(self, make: Make, dims: Sequence[Dim]) -> Value:
        op, lengths = self._op, self._op.extents
        pairs = zip(dims, lengths, strict=True)
        marked = tuple(replace(d, in_bounds=d.in_bounds or proved(d, n, self._intervals)) for d, n in pairs)
        access = replace(op.access, dims=marked)
        fill = () if op.fill is None else (op.fill,)
        operands = (op.ref, *self._values[: access.arity], *fill)
        return make.add(Load, *operands, access=access, filled=op.filled)

    def _is_near(self, terms: Sequence[Term], size: int) -> bool:
        """True if rows at computed positions are surely in VMEM; from HBM they are fetched one by one."""
        whole = padded_bytes(self._op.extents, F32) <= _SURELY_FITS and size >= SUBLANES
        return whole or all(self._values[t.operand] in self._grid for t in terms)

    def _sum(self, make: Make, terms: Sequence[Term], remainder: Position) -> Value | None:
        """An int32 value of the sum of terms: exact, or far from the array if the position, sum + remainder, is.

        None if a term has digits, or if the sum may leave int32 and is not a single term that a clamp keeps inside.
        """
        (first, *more), values = terms, self._values
        if not more and first.plain and first.stride == 1:
            return values[first.operand]
        total = position_interval(Position(tuple(terms)), self._intervals)
        if total is None or not total.within(-(2**31), 2**31 - 1):
            near = position_interval(remainder, self._intervals)
            if more or not first.plain or abs(first.stride) > _FAR >> 9 or not (near and near.within(-_FAR, _FAR)):
                return None
            most = 2 * _FAR // abs(first.stride)
            number = make.of("min", make.of("max", values[first.operand], -most), most)
            return make.of("mul", number, first.stride)
        if not all(t.plain for t in terms):
            return None
        parts = [make.of("mul", values[t.operand], t.stride) for t in terms]
        return reduce(partial(make.of, "add"), parts)

    def _number_of(self, value: Value) -> int:
        if value not in self._values:
            self._values.append(value)
            self._intervals.append(None)
        return self._values.index(value)


def _pieces(low: int, high: int, step: int, unit: int) -> tuple[Span, ...]:
    """Tiles that cover a span: start and size of each, in elements.

    Starts are relative to a multiple of `step`; 0 for starts that are constants. The position of each tile is a
    multiple of its size.
    """
    spans = list[Span]()
    start = low // unit * unit
    while start < high:
        count, common = cdiv(high - start, unit), gcd(step, start) // unit
        size = count if not step else max(n for n in range(1, min(count, common) + 1) if common % n == 0)
        spans.append((start, size * unit))
        start += size * unit
    return tuple(spans)


def _cut(make: Make, x: Value, op: Load, d: int, base: _Base) -> Value:
    """The elements of a load along one dim, cut out of the loaded tiles."""
    axis, size = _axis(op, d), op.access.dims[d].size
    if base.ahead_in_program is None:
        return make.part(x, axis, base.ahead, base.ahead + size)
    start = make.of("add", base.ahead_in_program, base.ahead)
    zero = make.number(0, INDEX)
    shape = x.tile.shape
    starts = [start if n == axis else zero for n in range(len(shape))]
    return make.add(DynamicSlice, x, *starts, sizes=(*shape[:axis], size, *shape[axis + 1 :]))


def _axis(op: Load, d: int) -> int:
    """The dim of the tile that a dim of the array is."""
    return op.access.kept.index(d)
