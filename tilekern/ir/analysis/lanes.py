"""Proof that an axis may be cut between any two elements, not only between tiles.

Devices that divide an axis may get parts that are no whole tiles. Then the lanes of a tile come together in other ways
than on one device. A part has a last tile of its own, with lanes behind its end. Results stay the same if

- each lane is computed from its own element alone, and stored to its own element; or
- lanes are added up, lanes behind the end add exactly 0, and only linear ops follow.

Each value has a `_Fact`. A tile has at most one *own* dim: lane n of it depends on element n of the tile alone. Its
*varied* dims differ along lanes for another reason, as an `arange` does, or an array that the axis does not cut. Along
all other dims a tile is uniform. Along one dim, own and uniform lanes may be combined. Own and varied lanes may not: a
result would depend on the place of its lane in the tile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilekern.ir.analysis.additive import is_linear, is_zero
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.carries import carries
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value, definitions
from tilekern.ir.debug import Assert, Print
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp, WriteOp
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import kind_of

_NONE = frozenset[int]()


@record
class _Fact:
    """Facts of one value, about lanes along the axis.

    Attributes:
      own: the dim along which each lane depends on its own element alone; None if no lane depends on any.
      varied: the other dims along which lanes differ.
      tail: the number in each lane behind the end of the array; of a value without own lanes, the number in all lanes;
        None if it is not proved.
      summed: True for a sum over own lanes, and for a value that is linear in such a sum.
    """

    own: int | None = None
    varied: frozenset[int] = _NONE
    tail: Any = None
    summed: bool = False


def lanes_are_independent(
    func: Func,
    indices: Mapping[Value, Axis],
    dims: Collection[tuple[Value, int]],
    comparisons: Collection[Op],
    ranges: Mapping[Value, Interval],
) -> bool:
    """True if the tiles of an axis may begin anywhere without a change of results.

    Args:
      func: the Func.
      indices: the indices of the axis in the grid or in folds, each with its axis. All have the same block, and each
        access with such an index takes the elements [block * index, block * index + block) of a dim.
      dims: the dims of params that the axis cuts, as (param, dim).
      comparisons: of positions along the axis with 0 and with the extent.
      ranges: by `ranges.analyze(func)`, the intervals of integers that do not wrap around.
    """
    return _Lanes(func, indices, dims, comparisons, ranges).run()


class _CombinedError(Exception):
    """An op combines lanes."""


class _Lanes:
    def __init__(
        self,
        func: Func,
        indices: Mapping[Value, Axis],
        dims: Collection[tuple[Value, int]],
        comparisons: Collection[Op],
        ranges: Mapping[Value, Interval],
    ) -> None:
        self._func, self._indices, self._dims, self._comparisons = func, indices, {*dims}, {*comparisons}
        self._ranges, self._defined = ranges, definitions(func)
        self._block_size = next(axis.block for axis in indices.values())
        self._facts: dict[Value, _Fact] = {}
        # Carries that begin at 0, and the carries among them that an op took for sums.
        self._zeros: set[Value] = set()
        self._taken: set[Value] = set()

    def run(self) -> bool:
        """False if lanes are combined by more than sums."""
        try:
            self._block(self._func.body)
        except _CombinedError:
            return False
        return True

    def _of(self, value: Value) -> _Fact:
        return self._facts.get(value, _Fact())

    def _block(self, block: Block) -> None:
        for op in block.ops:
            self._op(op)

    def _op(self, op: Op) -> None:
        match op:
            case Fold() | While():
                self._loop(op)
            case Switch():
                self._require_shared(op.operands)
                for region in op.regions:
                    self._block(region)
                for result, *values in zip(op.results, *(region.results for region in op.regions), strict=True):
                    self._choose(result, values)
            case Load():
                self._facts[op.result] = self._loaded(op)
            case WriteOp():
                self._write(op)
            case Print() | Assert():
                self._require_shared(op.operands)
            case _:
                fact = self._computed(op)
                self._facts.update(dict.fromkeys(op.results, fact))

    def _require_shared(self, values: Sequence[Value]) -> None:
        """Refuse values that depend on lanes of the axis, where a value decides for all lanes, as a loop bound does."""
        if any(fact.own is not None or fact.summed for fact in map(self._of, values)):
            raise _CombinedError

    def _choose(self, result: Value, values: Sequence[Value]) -> None:
        """Note that the result of a switch is one of the values.

        If one value is a sum, all must be: any other value would be added as often as there are tiles.
        """
        for value in values:
            self._join(result, value)
        if self._of(result).summed and not all(map(self._is_sum, values)):
            raise _CombinedError

    def _is_sum(self, value: Value) -> bool:
        """True for a sum over lanes, and for 0, the sum of no lanes."""
        if value in self._zeros:
            self._taken.add(value)
            return True
        return self._of(value).summed or is_zero(value, self._defined)

    # --- loops -------------------------------------------------------------------------------------------------------

    def _loop(self, op: Fold | While) -> None:
        self._require_shared(op.operands[:2] if isinstance(op, Fold) else ())
        for carry in carries(op):
            self._zeros.update(carry.args if is_zero(carry.init, self._defined) else ())
            self._facts.update(dict.fromkeys((*carry.args, carry.result), self._of(carry.init)))
        grows = True
        while grows:  # each iteration may add facts to a carry
            for region in op.regions:
                self._block(region)
            joined = [self._join(v, carry.yielded) for carry in carries(op) for v in (*carry.args, carry.result)]
            grows = any(joined)
        if isinstance(op, While):
            self._require_shared(op.condition.results)
        is_of_axis = isinstance(op, Fold) and op.body.args[0] in self._indices
        # The carry of a loop over the axis has lanes of all tiles. We know of no program in which it reaches a store
        # that other rules accept; this rule does not depend on them.
        if is_of_axis and any(self._of(carry.result).own is not None for carry in carries(op)):
            raise _CombinedError
        # A carry that is a sum over lanes must be a sum at the start and after each iteration. Another number would
        # count once for each tile.
        summed = [carry for carry in carries(op) if self._of(carry.result).summed]
        if not all(self._is_sum(value) for carry in summed for value in (carry.init, carry.yielded)):
            raise _CombinedError
        if any(not self._taken.isdisjoint(carry.args) for carry in carries(op) if carry not in summed):
            raise _CombinedError

    def _join(self, value: Value, source: Value) -> bool:
        """Note that `value` may equal `source`, of the same type; True if this changes the fact of `value`."""
        a, b = self._facts.setdefault(value, self._of(source)), self._of(source)
        tail = a.tail if _is_same(a.tail, b.tail) else None
        joined = replace(_pointwise([a, b]), tail=tail, summed=a.summed or b.summed)
        self._facts[value] = joined
        return replace(joined, tail=tail is None) != replace(a, tail=a.tail is None)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _along(self, op: MemoryOp) -> frozenset[int]:
        """The dim of an access's tile whose lanes are elements of the axis, as a set; empty if there is none."""
        pairs = zip(op.access.lanes, op.access.dims, strict=True)
        cut = ((n, lane) for n, (lane, dim) in enumerate(pairs) if lane is not None and dim.kind == "block")
        return frozenset(lane for n, lane in cut if (op.ref, n) in self._dims)

    def _loaded(self, op: Load) -> _Fact:
        along = self._along(op)
        facts = [_Fact(lane) for lane in along]
        for dim, lane in zip(op.access.dims, op.access.lanes, strict=True):
            positions = [self._of(op.positions[term.operand]) for term in dim.position.terms]
            if any(fact.summed for fact in positions):
                raise _CombinedError
            if lane is None or lane in along:
                continue
            if any(fact.own is not None for fact in positions):
                facts.append(_Fact(lane))
            if dim.kind == "block" or any(fact.varied for fact in positions):
                facts.append(_Fact(None, frozenset({lane}) & _long(op.result.tile.shape)))
        mask = _Fact() if op.mask is None else self._of(op.mask)
        fill = _Fact(tail=np.zeros((), op.result.tile.dtype)) if op.fill is None else self._of(op.fill)
        if mask.summed or fill.summed:
            raise _CombinedError
        is_filled = bool(along) or _is_same(mask.tail, np.False_)
        return replace(_pointwise([*facts, mask]), tail=fill.tail if is_filled else None)

    def _write(self, op: WriteOp) -> None:
        self._require_shared(op.positions)
        along, value = self._along(op), self._of(op.value)
        facts = [value, *([] if op.mask is None else [self._of(op.mask)])]
        for fact in facts:
            if (fact.own is not None and fact.own not in along) or fact.varied & along:
                raise _CombinedError
        is_divided = any((op.ref, n) in self._dims for n in range(len(op.access.dims)))
        # A sum over lanes of one tile belongs in a sum over tiles. In a divided array it would tell where tiles begin.
        if is_divided == value.summed or any(fact.summed for fact in facts[1:]):
            raise _CombinedError

    # --- ops that compute --------------------------------------------------------------------------------------------

    def _computed(self, op: Op) -> _Fact:
        facts = [self._of(v) for v in op.operands]
        if op in self._comparisons:
            return self._compared(op)
        if any(fact.summed for fact in facts):
            return self._linear(op, facts)
        if all(fact.own is None for fact in facts) and not isinstance(op, (Constant, Iota, *_POINTWISE, *_PLACED)):
            return _Fact(None, _long(op.results[0].tile.shape))
        match op:
            case Constant():
                return _constant(op)
            case Iota():
                return _Fact(None, frozenset({op.dim}) & _long(op.shape))
            case Stop():
                return facts[0]
            case Custom():
                return self._with_rule(op, facts)
            case Elementwise() | Select() | Convert() | Bitcast():
                return replace(_pointwise(facts), tail=_tail(op, facts))
            case Broadcast() | Transpose() | Reshape():
                return _placed(op, facts[0])
            case Reduce() | ArgReduce():
                return self._reduced(op, facts[0])
            case Dot():
                return _product(op, facts)
            case _:
                return _beside_own(op, facts)

    def _compared(self, op: Op) -> _Fact:
        """The fact of a comparison of the positions of lanes with the extent, or with 0."""
        positions = op.operands[0]
        dims = self._of(positions).varied
        if len(dims) > 1 or any(positions.tile.shape[d] != self._block_size for d in dims):
            raise _CombinedError
        is_below = isinstance(op, Elementwise) and op.function == "lt"
        return _Fact(next(iter(dims), None), tail=None if not dims else np.bool_(not is_below))

    def _linear(self, op: Op, facts: Sequence[_Fact]) -> _Fact:
        """The fact of an op on a sum over lanes."""
        active = {v for v, fact in zip(op.operands, facts, strict=True) if fact.summed}
        if isinstance(op, Select) or (isinstance(op, Elementwise) and op.function == "add"):
            zeros = self._zeros.intersection(op.operands) - active
            self._taken |= zeros
            active |= zeros
        if not is_linear(op, active) or any(fact.own is not None for fact in facts):
            raise _CombinedError
        # A sum of integers may wrap around. As a float it is then no longer the sum of the parts.
        wraps = isinstance(op, Convert) and kind_of(op.operands[0].tile.dtype) != "float"
        if wraps and op.operands[0] not in self._ranges:
            raise _CombinedError
        return _Fact(None, _long(op.result.tile.shape), summed=True)

    def _with_rule(self, op: Custom, facts: Sequence[_Fact]) -> _Fact:
        """The fact of the first operand, whose tangent by the rule must depend on the same lanes."""
        if op.rule is None:
            return facts[0]
        tangents = [replace(facts[n], tail=None) for n in op.moving]
        self._facts.update(zip(op.rule.args, (*facts, *tangents), strict=True))
        self._block(op.rule)
        tangent = self._of(op.rule.results[0])
        either = _pointwise([facts[0], tangent])
        if tangent.summed or either.own != facts[0].own:
            raise _CombinedError
        return replace(either, tail=facts[0].tail)

    def _reduced(self, op: Reduce | ArgReduce, fact: _Fact) -> _Fact:
        dims = op.dims if isinstance(op, Reduce) else (op.dim,)
        dims_left = [d for d in range(len(op.operands[0].tile.shape)) if d not in dims]
        varied = frozenset(n for n, d in enumerate(dims_left) if d in fact.varied)
        if fact.own not in dims:
            stays = isinstance(op, Reduce) and op.monoid in ("sum", "max", "min") and _is_nothing(fact.tail)
            return _Fact(None if fact.own is None else dims_left.index(fact.own), varied, fact.tail if stays else None)
        if not (isinstance(op, Reduce) and op.monoid == "sum" and _is_nothing(fact.tail)):
            raise _CombinedError
        return _Fact(None, varied, summed=True)


_POINTWISE = (Elementwise, Select, Convert, Bitcast, Stop, Custom)
_PLACED = (Broadcast, Transpose, Reshape)


def _long(shape: Sequence[int]) -> frozenset[int]:
    return frozenset(d for d, size in enumerate(shape) if size > 1)


def _constant(op: Constant) -> _Fact:
    flat = op.array.reshape(-1)
    if flat.size and flat.tobytes() == flat[:1].tobytes() * flat.size:
        return _Fact(tail=flat[0])
    return _Fact(None, _long(op.result.tile.shape))


def _pointwise(facts: Sequence[_Fact]) -> _Fact:
    """The fact of a tile computed lane by lane from tiles of its shape."""
    own = {fact.own for fact in facts if fact.own is not None}
    varied = _NONE.union(*(fact.varied for fact in facts))
    if len(own) > 1 or own & varied:
        raise _CombinedError
    return _Fact(next(iter(own), None), varied)


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and b is not None and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _is_nothing(tail: Any) -> bool:
    """True for a known 0, which changes no sum."""
    return tail is not None and not tail


def _tail(op: Op, facts: Sequence[_Fact]) -> Any:
    """The number in lanes behind the end, by the meaning of the op; None if it is not proved."""
    tails = [fact.tail for fact in facts]
    if isinstance(op, Select) and tails[0] is not None:
        return tails[1] if tails[0] else tails[2]
    is_and = isinstance(op, Elementwise) and op.function == "and" and op.result.tile.dtype == np.bool_
    if is_and and any(t is not None and not t for t in tails):
        return np.False_
    if any(t is None for t in tails):
        return None
    arrays = [np.asarray(t, v.tile.dtype).reshape(()) for t, v in zip(tails, op.operands, strict=True)]
    return op.evaluate(*arrays).reshape(())


def _placed(op: Broadcast | Transpose | Reshape, fact: _Fact) -> _Fact:
    """The fact of the result of an op that gives dims other places."""
    places = kept_places(op)
    if fact.own is not None and fact.own not in places:
        raise _CombinedError
    own = None if fact.own is None else places[fact.own]
    if all(d in places for d in fact.varied):
        return replace(fact, own=own, varied=frozenset(places[d] for d in fact.varied))
    long_dims = _long(op.result.tile.shape).difference(() if own is None else (own,))
    return replace(fact, own=own, varied=long_dims)


def kept_places(op: Broadcast | Transpose | Reshape) -> dict[int, int]:
    """Maps each dim of the operand whose lanes stay one dim of the result to that dim; of a reshape, long dims only."""
    (x,) = op.operands
    match op:
        case Broadcast():
            return {d: n for d, n in enumerate(op.dims) if x.tile.shape[d] == op.result.tile.shape[n]}
        case Transpose():
            return {d: n for n, d in enumerate(op.permutation)}
        case Reshape():
            shape, result_shape = x.tile.shape, op.result.tile.shape
            ends = {(int(np.prod(result_shape[:n])), size): n for n, size in enumerate(result_shape) if size > 1}
            places = {d: ends.get((int(np.prod(shape[:d])), size)) for d, size in enumerate(shape)}
            return {d: n for d, n in places.items() if n is not None}


def _product(op: Dot, facts: Sequence[_Fact]) -> _Fact:
    """The fact of a dot. It combines pairs of contracted dims, and of batch dims, lane by lane."""
    contracted, batched = (_own_pairs(pairs, facts) for pairs in (op.contract, op.batch))
    if contracted:
        tails = [fact.tail for fact in facts]
        product = None if any(t is None for t in tails) else np.float64(tails[0]) * np.float64(tails[1])
        used = [f.own for f, d in zip(facts, op.contract, strict=True) if f.own is not None and f.own not in d]
        if not _is_nothing(product) or used or len(contracted) > 1:  # two pairs: all pairs of lanes
            raise _CombinedError
        return _Fact(None, _long(op.result.tile.shape), summed=True)
    own_dims = {*batched}
    free = [*op.free(0), *(len(op.operands[0].tile.shape) + d for d in op.free(1))]
    sides = zip(facts, (0, len(op.operands[0].tile.shape)), strict=True)
    placed = {first + fact.own for fact, first in sides if fact.own is not None}
    own_dims |= {len(op.batch[0]) + n for n, d in enumerate(free) if d in placed}
    if len(own_dims) > 1:
        raise _CombinedError
    return _Fact(next(iter(own_dims), None), _long(op.result.tile.shape) - own_dims)


def _own_pairs(pairs: tuple[Sequence[int], Sequence[int]], facts: Sequence[_Fact]) -> list[int]:
    """The indices of the pairs of dims of a dot in which an operand's dim is its own dim."""
    sides = (
        [
            _Fact(0 if f.own == d else None, frozenset({0} if d in f.varied else ()))
            for f, d in zip(facts, dims, strict=True)
        ]
        for dims in zip(*pairs, strict=True)
    )
    return [n for n, pair in enumerate(sides) if _pointwise(pair).own is not None]


def _beside_own(op: Op, facts: Sequence[_Fact]) -> _Fact:
    """The fact of the result of a scan, sort, slice or other move of lanes, which leaves the own dim as it is.

    Example: a scan along dim 1 of a tile whose own dim is 0 has the own dim 0.

    Raises:
      _CombinedError: the op combines or moves lanes along the own dim, or its class has no rule here.
    """
    own, rank = next(fact.own for fact in facts if fact.own is not None), len(op.results[0].tile.shape)
    shape = op.operands[0].tile.shape
    match op:
        case Scan() | LinearScan() | Sort() | TopK() | Concatenate():
            keeps = op.dim != own and all(len(v.tile.shape) == rank for v in op.operands)
        case Slice() | DynamicSlice():
            keeps = op.result.tile.shape[own] == shape[own] and facts[0].own == own
        case DynamicUpdateSlice():
            keeps = op.operands[1].tile.shape[own] == shape[own]
        case Pad():
            keeps = op.low[own] == op.high[own] == op.interior[own] == 0
        case Reverse():
            keeps = own not in op.dims
        case Take():
            return _taken(op, facts)
        case _:
            keeps = False
    if not keeps:
        raise _CombinedError
    tiles = [fact for fact, v in zip(facts, op.operands, strict=True) if v.tile.shape]
    joined = _pointwise(tiles)
    return _Fact(joined.own, _long(op.results[0].tile.shape) - {joined.own})


def _taken(op: Take, facts: Sequence[_Fact]) -> _Fact:
    """The fact of the elements of a tile at places that another tile holds."""
    tile, places = facts
    if tile.own == op.dim:
        raise _CombinedError
    if op.along:
        fact = _pointwise([replace(tile, varied=tile.varied - {op.dim}), places])
        return _Fact(fact.own, _long(op.result.tile.shape) - {fact.own})
    new_dims = len(op.operands[1].tile.shape) - 1
    own_dims = {tile.own + new_dims * (tile.own > op.dim)} if tile.own is not None else set[int]()
    own_dims |= {op.dim + places.own} if places.own is not None else set()
    if len(own_dims) > 1:
        raise _CombinedError
    return _Fact(next(iter(own_dims)), _long(op.result.tile.shape) - own_dims)
