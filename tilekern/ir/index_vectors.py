"""Index vectors whose lanes come from outside of an array: such a lane addresses nothing.

    v = load x[i : i + 4];  store y to o[gather v]      →  store y to o[gather select(i + iota < 10, v, -1)]   x: [10]
    w = 2 * v + 1;  store y to o[gather w]              →  store y to o[gather w] mask i + iota < 10

Invalid lanes are followed through ops, loops and branches (see `validity`): a loop gets a further carry for each carry
that may have invalid lanes and that an index vector depends on. An invalid lane of an index vector gets the index -1,
which is out of bounds. It is masked instead if `canonicalize` may take the vector's arithmetic into the access, where
positions are exact, so no index value could mean "invalid". Scalars that select a place, a branch, or a number of
iterations do not count.

A Func is returned as it is if no lane of an index vector may come from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tilekern.ir.analysis.ranges import INT32, Interval, analyze, position_interval, proved_dims, update
from tilekern.ir.compute import Constant, Select
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Dim, Load, MemoryOp, Position, Term, WriteOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, I32, INDEX, TileType
from tilekern.ir.validity import Valid, Validity, sources

_NOWHERE = -1
_WRAP = 1 << 32  # int32 arithmetic is exact up to multiples of it
_AFFINE = ("neg", "add", "sub", "mul", "div", "rem")


def guard_index_vectors(func: Func) -> Func:
    """Apply the rewrite above."""
    vectors = [v for op in func.walk() if isinstance(op, MemoryOp) for v in _vectors(op)]
    if not vectors:
        return func
    ranges = analyze(func)
    doubtful = _doubtful(func, vectors, ranges)
    return _Guard(doubtful, ranges).run(func) if not doubtful.isdisjoint(vectors) else func


def valid_lanes(func: Func) -> tuple[Func, Mapping[MemoryOp, Mapping[int, Value]]]:
    """The Func with ops that compute valid lanes of index vectors of writes, and these lanes by access and dim.

    Valid lanes are a bool tile. No access is changed. Dims are left out whose lanes all are valid.
    """
    vectors = [v for op in func.walk() if isinstance(op, WriteOp) for v in _vectors(op)]
    if not vectors:
        return func, {}
    ranges = analyze(func)
    noting = _Noting(_doubtful(func, vectors, ranges), ranges, _bare(func))
    return noting.run(func), noting.valid_lanes


def _vectors(op: MemoryOp) -> list[Value]:
    return [v for v in op.positions if v.tile.shape]


def _bare(func: Func) -> set[Value]:
    """The index vectors that are used as the index of a dim, and for nothing else."""
    indices, used_otherwise = set[Value](), set[Value]()
    for op in func.walk():
        alone = set[Value]()
        if isinstance(op, MemoryOp):
            terms = [dim.position.terms[0] for dim in op.access.dims if _is_one_term(dim.position)]
            alone = {op.positions[term.operand] for term in terms}
        indices |= alone
        used_otherwise.update(v for v in op.operands if v not in alone)
        used_otherwise.update(v for region in op.regions for v in region.results)
    return indices - used_otherwise


def _is_one_term(position: Position) -> bool:
    return bool(position.terms) and position == Position((Term(position.terms[0].operand, 1),))


# --- values whose lanes may be invalid -------------------------------------------------------------------------------


def _doubtful(func: Func, vectors: Sequence[Value], ranges: Mapping[Value, Interval]) -> set[Value]:
    """The values that `vectors` are computed from, and of which some lane may come from outside."""
    comes_from: dict[Value, Sequence[Value]] = {}
    outside: set[Value] = set()
    for op in func.walk():
        comes_from.update(_flow(op))
        if isinstance(op, Load) and not op.filled and (op.masked or not all(proved_dims(op, ranges))):
            outside.add(op.result)
    contributing = _reached(vectors, comes_from)
    goes_to: dict[Value, list[Value]] = {}
    for value in contributing:
        for origin in comes_from.get(value, ()):
            goes_to.setdefault(origin, []).append(value)
    return _reached(outside & contributing, goes_to)


def _flow(op: Op) -> dict[Value, Sequence[Value]]:
    """Maps each value that an op defines to the values from which it takes lanes."""
    match op:
        case Load():
            return {op.result: () if op.filled else _vectors(op)}
        case Fold():
            groups = zip(op.results, op.body.args[1:], op.inits, op.body.results, strict=True)
        case While():
            args = zip(op.results, op.condition.args, op.body.args, strict=True)
            pairs = zip(op.operands, op.body.results, strict=True)
            return {v: pair for defined, pair in zip(args, pairs, strict=True) for v in defined}
        case Switch():
            return dict(zip(op.results, zip(*(region.results for region in op.regions), strict=True), strict=True))
        case _:
            return {result: sources(op) for result in op.results}
    return {v: (init, yielded) for result, arg, init, yielded in groups for v in (result, arg)}


def _reached(start: Iterable[Value], edges: Mapping[Value, Sequence[Value]]) -> set[Value]:
    reached, pending = set[Value](), list(start)
    while pending:
        value = pending.pop()
        if value not in reached:
            reached.add(value)
            pending += edges.get(value, ())
    return reached


def _span(dim: Dim, operands: Sequence[Interval | None]) -> Interval | None:
    """The interval of the positions of all lanes of a dim, in exact arithmetic."""
    first = position_interval(dim.position, operands)
    return (
        None if first is None else Interval(first.low, first.high + dim.size - 1 if dim.kind == "block" else first.high)
    )


# --- the rewrite -----------------------------------------------------------------------------------------------------


class _Guard(Rewriter):
    """Computes the valid lanes of doubtful values; `_doubtful` and `_valid` hold values of the original Func."""

    def __init__(self, doubtful: set[Value], ranges: dict[Value, Interval]) -> None:
        super().__init__(lambda op, rewriter: None)
        self._doubtful, self._ranges = doubtful, ranges
        self._valid: dict[Value, Value] = {}

    def add(self, op: Op) -> tuple[Value, ...]:
        results = super().add(op)
        update(self._ranges, op)
        return results

    def visit(self, op: Op) -> Sequence[Value]:
        if isinstance(op, (Fold, While, Switch)):
            return self._control(op)
        if isinstance(op, MemoryOp):
            return self._memory(op)
        results = super().visit(op)
        if op.results and op.result in self._doubtful:
            copy = self.definition(results[0])
            assert copy is not None
            self._note(op.result, Validity(self, copy).of_result(self._operands(op)))
        return results

    def _operands(self, op: Op) -> list[Valid]:
        """The valid lanes of the operands of a pure op."""
        return [self._valid.get(v) for v in op.operands]

    def _note(self, value: Value, valid: Valid) -> None:
        if valid is not None:
            self._valid[value] = valid

    # --- memory ---

    def _memory(self, op: MemoryOp) -> Sequence[Value]:
        """The access, without the invalid lanes of its index vectors."""
        make, guarded = Validity(self, op), op.copy(tuple(self.value(v) for v in op.operands))
        masks: list[Valid] = []
        for dim, number, valid in self._invalid(op):
            vector, lane = guarded.positions[number], op.access.lanes[dim]
            assert lane is not None
            if _is_one_term(op.access.dims[dim].position) and not self._is_sum(vector):
                chosen = make.select(valid, vector, _NOWHERE)
                guarded = guarded.copy(_with(guarded.operands, guarded.leading + number, chosen))
            else:
                masks.append(make.broadcast(valid, op.access.shape, (lane,)))
        mask = make.all(guarded.mask, *masks)
        if mask is not None and mask is not guarded.mask:
            guarded = _masked(guarded, mask)
        return self._done(op, guarded)

    def _invalid(self, op: MemoryOp) -> Iterator[tuple[int, int, Value]]:
        """For each dim whose index vector may have invalid lanes: (dim, number of the operand, valid lanes)."""
        for number, dim in enumerate(op.access.dims):
            operand = next((t.operand for t in dim.position.terms if op.positions[t.operand].tile.shape), -1)
            valid = self._valid.get(op.positions[operand]) if operand >= 0 else None
            if valid is not None:
                yield number, operand, valid

    def _done(self, op: MemoryOp, copy: MemoryOp) -> Sequence[Value]:
        """Add the copy of an access; its results replace the results of the original."""
        results = self.add(copy)
        if isinstance(copy, Load) and op.results[0] in self._doubtful:
            self._note(op.results[0], self._read(copy, Validity(self, op)))
        for before, after in zip(op.results, results, strict=True):
            self.replace(before, after)
        return results

    def _is_sum(self, vector: Value) -> bool:
        """True if `canonicalize` may take the arithmetic of a vector into an access."""
        match self.definition(vector):
            case Elementwise(function=function):
                return function in _AFFINE
            case op:
                return isinstance(op, Broadcast)

    def _read(self, op: Load, make: Validity) -> Valid:
        """The lanes of a load without a fill that are in bounds and not masked."""
        masks, proofs = [op.mask], proved_dims(op, self._ranges)
        for dim, lane, length, is_inside in zip(op.access.dims, op.access.lanes, op.extents, proofs, strict=True):
            if not is_inside:
                inside = self._inside(op, dim, length, make)
                if inside is None:
                    return self._told_apart(op, make)
                masks.append(make.broadcast(inside, op.access.shape, () if lane is None else (lane,)))
        return make.all(*masks)

    def _inside(self, op: Load, dim: Dim, length: int, make: Validity) -> Valid:
        """The lanes of a dim that are in bounds, a scalar for an index; None if int32 arithmetic cannot tell."""
        if not all(term.plain for term in dim.position.terms):
            return None
        span = _span(dim, [self._ranges.get(v, INT32) for v in op.positions])
        assert span is not None
        if not (span.within(length - _WRAP, _WRAP - 1) and length < _WRAP // 2):
            return None
        place = self._place(op, dim, make)
        wraps = not span.within(-_WRAP // 2, _WRAP // 2 - 1)
        below, above = span.low < 0 or wraps, span.high >= length or wraps
        not_before = make.of("ge", place, 0) if below else None
        not_behind = make.of("lt", place, length) if above else None
        return make.all(not_before, not_behind)

    def _place(self, op: Load, dim: Dim, make: Validity) -> Value:
        """Positions of the lanes of a dim, in int32 arithmetic as `Tile.indices` does it, so that `cse` finds it."""
        tile = INDEX if dim.kind == "index" else TileType((dim.size,), I32)
        lanes = make.add(Iota, shape=tile.shape, dtype=I32, dim=0) if dim.kind == "block" else None
        const = _wrapped(dim.position.const)
        start = make.number(const, INDEX) if const else None
        for term in dim.position.terms:
            part = op.positions[term.operand]
            if term.stride != 1:
                part = make.of("mul", part, _wrapped(term.stride))
            if part.tile.shape:
                lanes = part
            else:
                start = part if start is None else make.of("add", part, start)
        if start is None:
            return make.number(0, tile) if lanes is None else lanes
        start = make.broadcast(start, tile.shape, ())
        return start if lanes is None else make.of("add", lanes, start)

    def _told_apart(self, op: Load, make: Validity) -> Value:
        """The lanes that are read, without arithmetic: two loads with fills 0 and 1 differ in all lanes not read."""
        tile = op.result.tile
        fill = make.number(1, TileType((), tile.dtype))
        (filled,) = self.add(replace(op, operands=(*op.operands, fill), filled=True))
        not_zero = make.of("ne", op.result, 0)
        return make.of("or", not_zero, make.of("ne", filled, 1))

    # --- control ---

    def _control(self, op: Fold | While | Switch) -> Sequence[Value]:
        """A loop or switch with a further carry or result for each doubtful carry or result: its valid lanes."""
        first_carry = 1 if isinstance(op, Fold) else 0
        carried = [region.args[first_carry:] for region in op.regions]
        groups = zip(op.results, *(args for args in carried if args), strict=True)
        doubtful = [n for n, group in enumerate(groups) if not self._doubtful.isdisjoint(group)]
        if not doubtful:
            return super().visit(op)
        inits = () if isinstance(op, Switch) else op.operands[-len(op.results) :]
        operands = (*(self.value(v) for v in op.operands), *(self._whole(inits[n], op) for n in doubtful if inits))
        regions = [self._region(op, region, args, doubtful) for region, args in zip(op.regions, carried, strict=True)]
        results = self.add(op.copy(operands, tuple(regions)))
        self._valid.update(zip((op.results[n] for n in doubtful), results[len(op.results) :], strict=True))
        for before, after in zip(op.results, results, strict=False):
            self.replace(before, after)
        return results[: len(op.results)]

    def _region(self, op: Op, region: Block, carried: tuple[Value, ...], doubtful: Sequence[int]) -> Block:
        """A region that takes, and yields, the valid lanes of the doubtful carries."""
        valid_args = tuple(Value(TileType(carried[n].tile.shape, BOOL)) for n in doubtful if carried)

        def body(*_: Value) -> tuple[Value, ...]:
            self._valid.update(zip((carried[n] for n in doubtful if carried), valid_args, strict=True))
            results = self.inline(region)
            if isinstance(op, While) and region is op.condition:
                return results
            return (*results, *(self._whole(region.results[n], op) for n in doubtful))

        return self.block((*region.args, *valid_args), body)

    def _whole(self, value: Value, op: Op) -> Value:
        return Validity(self, op).whole(self._valid.get(value), value)


class _Noting(_Guard):
    """Leaves the accesses as they are, and notes the valid lanes of their index vectors."""

    def __init__(self, doubtful: set[Value], ranges: dict[Value, Interval], bare: set[Value]) -> None:
        super().__init__(doubtful, ranges)
        self._bare = bare
        self.valid_lanes: dict[MemoryOp, dict[int, Value]] = {}

    def _operands(self, op: Op) -> list[Valid]:
        """The valid lanes of the operands, but that the condition of a select that `_Guard` has made is valid.

        Such a select, of a doubtful vector or -1, is the index of a dim. Its condition compares the place that the
        vector was loaded from, which a scalar that was read outside of an array may have selected: as the mask of an
        access, this condition does not make lanes invalid.
        """
        valid = super()._operands(op)
        is_guard = isinstance(op, Select) and op.result in self._bare and self._is_nowhere(op.operands[2])
        return [None, *valid[1:]] if is_guard and valid[1] is not None else valid

    def _is_nowhere(self, value: Value) -> bool:
        constant = self.definition(self.value(value))
        return isinstance(constant, Constant) and bool((constant.array == _NOWHERE).all())

    def _memory(self, op: MemoryOp) -> Sequence[Value]:
        copy = op.copy(tuple(self.value(v) for v in op.operands))
        invalid = {dim: valid for dim, _, valid in self._invalid(op)}
        if invalid and isinstance(op, WriteOp):
            self.valid_lanes[copy] = invalid
        return self._done(op, copy)


def _with(operands: tuple[Value, ...], number: int, value: Value) -> tuple[Value, ...]:
    return (*operands[:number], value, *operands[number + 1 :])


def _masked[M: MemoryOp](op: M, mask: Value) -> M:
    """An access with another mask."""
    first = op.leading + op.access.arity
    return replace(op, operands=(*op.operands[:first], mask, *op.operands[first + op.masked :]), masked=True)


def _wrapped(number: int) -> int:
    """The number, wrapped around to int32."""
    return (number + _WRAP // 2) % _WRAP - _WRAP // 2
