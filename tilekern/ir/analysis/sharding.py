"""The dims of arrays that devices may divide among themselves, each running the same kernel on its part.

An axis of the grid, or of a fold, is a *factor* if the kernel on a part of it computes a part of the results:

    grid %i in i[N]   %0 = load %x[B*%i +: B, ...]   store f(%0) to %o[B*%i +: B, ...]    x and o divided: independent
    grid %i in i[N]   %0 = load %x[B*%i +: B, ...]   atomic add f(%0) to %s[...]          x divided, s an addend
    fold %k in k[N]   %0 = load %x[..., B*%k +: B]   yield %total + f(%0)                 x divided, results addends

No value may tell in which part a program is: an index of a factor is for positions in arrays that are divided with it,
and for comparisons with the extent. Parts are whole tiles, so that each program is a program of the undivided kernel.
If `lanes` proves that tiles may begin anywhere, parts may be any. `passes.divide` makes the Func of a part. The Func
must be as it was traced: passes replace the index of a single tile by 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tilekern.ir.analysis.additive import addends
from tilekern.ir.analysis.lanes import lanes_are_independent
from tilekern.ir.analysis.mixed_radix import Digit, Sum, Sums
from tilekern.ir.analysis.ranges import analyze
from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic, Dim, MemoryOp, WriteOp
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import kind_of

# A dim of an array: (number of the param, number of the dim).
type Place = tuple[int, int]


@record
class Factor:
    """A size that may be divided.

    Attributes:
      name: the name of the axis.
      sizes: the extents of the axis and of the dims. The number of parts must divide each size.
      dims: the dims of params that are divided with the axis.
      addends: the output params whose results on a part are addends of the whole results.
      indices: the indices of the axes of the grid and of folds that are divided.
      extents: the constants that hold the extent of an axis, for the ends of folds and for comparisons with positions.
      has_independent_elements: True if parts may begin inside of tiles: each element of the results depends on its own
        elements of the divided dims alone.
    """

    name: str
    sizes: frozenset[int]
    dims: frozenset[Place]
    addends: frozenset[int]
    indices: frozenset[Value]
    extents: frozenset[Constant]
    has_independent_elements: bool


@record
class Sharding:
    """The factors of a Func, and the reasons against other factors.

    Attributes:
      factors: all factors; no two factors have a dim in common.
      reasons: maps the name of each other axis to the reason why it cannot be divided.
      whole: maps each dim that programs access and no factor divides to the reason.
    """

    factors: tuple[Factor, ...]
    reasons: Mapping[str, str]
    whole: Mapping[Place, str]


def sharding_of(func: Func, *, with_other_blocks: bool = False) -> Sharding:
    """The factors of a Func as it was traced.

    Args:
      func: the Func.
      with_other_blocks: True if the kernel on a part may have other blocks, so that parts need not be whole tiles.
    """
    return _Analysis(func, with_other_blocks).run()


@dataclass
class _Axis:
    """An axis of the grid, or of folds; or several axes that cut the same dims.

    Attributes:
      axis: the axis, the first of several.
      indices: maps the index of each axis to the axis.
      folds: the folds over the axes; none for an axis of the grid.
      dims: the dims that are divided with the axes.
      sizes: the extents of the axes and of the dims.
      comparisons: the comparisons of positions along the axes with the extent, or with 0.
      extents: the constants in the comparisons with the extent, and in the ends of the folds.
      is_exact: True if each access takes the elements of one tile, from first to last.
      is_elementwise: True if it is proved that tiles may begin anywhere.
      reason: the reason why the axes cannot be divided; "" if there is none.
    """

    axis: Axis
    indices: dict[Value, Axis]
    folds: list[Fold]
    dims: set[Place] = field(default_factory=set[Place])
    sizes: list[int] = field(default_factory=list[int])
    comparisons: set[Op] = field(default_factory=set[Op])
    extents: set[Constant] = field(default_factory=set[Constant])
    is_exact: bool = True
    is_elementwise: bool = False
    reason: str = ""

    def with_twin(self, twin: _Axis) -> _Axis:
        """This axis and `twin` as one; this axis gives the name."""
        return _Axis(
            self.axis,
            self.indices | twin.indices,
            [*self.folds, *twin.folds],
            self.dims | twin.dims,
            [*self.sizes, *twin.sizes],
            self.comparisons | twin.comparisons,
            self.extents | twin.extents,
            self.is_exact and twin.is_exact,
            reason=self.reason or twin.reason,
        )


class _Analysis:
    def __init__(self, func: Func, with_other_blocks: bool) -> None:
        self._func, self._with_other_blocks = func, with_other_blocks
        self._numbers = {param: n for n, param in enumerate(func.params)}
        self._defined = definitions(func)
        self._ranges = analyze(func)
        self._sums = Sums(self._defined.get, self._ranges)
        self._users: defaultdict[Value, list[Op]] = defaultdict(list)
        for op in func.walk():
            for value in op.operands:
                self._users[value].append(op)
        self._axes: dict[Value, _Axis] = {}
        for index, axis in zip(func.body.args, func.axes, strict=True):
            self._axes[index] = _Axis(axis, {index: axis}, [], sizes=[axis.extent])
        for fold in (op for op in func.walk() if isinstance(op, Fold)):
            index = fold.body.args[0]
            self._axes[index] = _Axis(fold.axis, {index: fold.axis}, [fold], sizes=[fold.axis.extent])
        # Maps a dim that no axis may divide to the reason.
        self._whole: dict[Place, str] = {}

    def run(self) -> Sharding:
        """The factors of the Func, and the reasons against other axes."""
        for op in self._func.walk():
            if isinstance(op, MemoryOp):
                self._access(op)
        self._observe()
        axes = self._merged()
        for axis in axes:
            axis.reason = axis.reason or self._refused(axis)
        factors = [self._factor(axis) for axis in axes if not axis.reason]
        factor_of = {place: f for f in reversed(factors) for place in f.dims}
        refused = [axis for axis in axes if axis.reason]
        reasons = {place: f"along {axis.axis.name}: {axis.reason}" for axis in refused for place in axis.dims}
        return Sharding(
            tuple(f for f in factors if all(factor_of[place] is f for place in f.dims)),
            {axis.axis.name: axis.reason for axis in refused},
            {**reasons, **self._whole},
        )

    # --- positions ---------------------------------------------------------------------------------------------------

    def _access(self, op: MemoryOp) -> None:
        number = self._numbers[op.ref]
        shape = op.ref.ref.shape
        is_view = op.access.extents is not None and tuple(op.access.extents) != shape
        extents = op.extents
        for n, (dim, extent) in enumerate(zip(op.access.dims, extents, strict=True)):
            # A view shares with the array only the dims before the first reshaped dim.
            same = not is_view or (n < len(shape) and extents[: n + 1] == shape[: n + 1])
            self._dim((number, n) if same else None, dim, extent, op)
        if is_view:
            same = sum(1 for n in range(len(shape)) if extents[: n + 1] == shape[: n + 1])
            self._whole |= {(number, n): f"{op.ref.name} is reshaped" for n in range(same, len(shape))}

    def _dim(self, place: Place | None, dim: Dim, extent: int, op: MemoryOp) -> None:
        position = self._position(dim, op)
        used = [d for d in position.strides if d.value in self._axes]
        lead = max(used, key=lambda d: position.strides[d], default=None)
        if lead is not None and place is not None and self._follows(position, lead, dim, extent):
            axis = self._axes[lead.value]
            axis.dims.add(place)
            axis.sizes.append(extent)
            is_from_first = position == Sum({Digit(lead.value): axis.axis.block})
            axis.is_exact &= dim.kind == "block" and dim.size == axis.axis.block and is_from_first
            unfollowed = [d for d in used if d is not lead]
        else:
            unfollowed = used
            if place is not None:
                is_all = dim.kind == "block" and not position.strides and not position.const and dim.size == extent
                places = "as a whole by each program" if is_all else "at other places than those of a tile"
                self._whole[place] = f"{op.ref.name} is read or written {places}"
        for digit in unfollowed:
            self._fail(digit.value, f"its position in {op.ref.name} is not that of a tile alone")

    def _position(self, dim: Dim, op: MemoryOp) -> Sum:
        total = Sum({}, dim.position.const)
        for term in dim.position.terms:
            value = op.positions[term.operand]
            if term.plain:
                total = total.plus(self._sums.of(value), term.stride)
            else:
                total = total.plus(Sum({Digit(value, term.div, term.mod): 1}), term.stride)
        return total

    def _follows(self, position: Sum, lead: Digit, dim: Dim, extent: int) -> bool:
        """True if equal parts of the axis of `lead` touch disjoint, equal parts of the dim."""
        axis, stride = self._axes[lead.value].axis, position.strides[lead]
        if dim.kind not in ("block", "index") or lead.mod:
            return False
        if lead.div > 1:  # each element serves `div` tiles
            return (
                (axis.block, stride, dim.size) == (1, 1, 1)
                and len(position.strides) == 1
                and (extent * lead.div == axis.extent and position.const == 0)
            )
        below = Sum({d: s for d, s in position.strides.items() if d != lead}, position.const)
        if extent * axis.block != stride * axis.extent:
            return False
        if not below.strides:
            return below.const >= 0 and below.const + dim.size <= stride
        return below.within(0, stride - dim.size, self._ranges)

    # --- other uses of indices ---------------------------------------------------------------------------------------

    def _fail(self, index: Value, reason: str) -> None:
        axis = self._axes[index]
        axis.reason = axis.reason or reason

    def _observe(self) -> None:
        """Fail each axis whose index is used for more than positions and comparisons with the extent."""
        yielded = {r for block in _blocks(self._func.body) for r in block.results}
        for index in self._axes:
            pending, seen = [index], {index}
            while pending:
                value = pending.pop()
                if value in yielded:
                    self._fail(index, "its index is carried")
                for op in self._users[value]:
                    if _moves(op):
                        pending += [r for r in op.results if r not in seen]
                        seen.update(op.results)
                    elif self._compares_with_extent(op, index):
                        self._axes[index].comparisons.add(op)
                    elif not self._is_position(op, value):
                        self._fail(index, f"the body computes with its index ({_named(op)})")

    def _is_position(self, op: Op, value: Value) -> bool:
        """True for a load or a store whose position is `value`, which is none of its other operands.

        Each term of the position must be an index of the grid, or depend on none; `_access` judges such positions.
        """
        if not isinstance(op, MemoryOp) or value not in op.positions:
            return False
        other_operands = [v for n, v in enumerate(op.operands) if not op.leading <= n < op.leading + op.access.arity]
        gathers = [d for d in op.access.dims if d.kind in ("gather", "along")]
        inside = {op.positions[t.operand] for d in gathers for t in d.position.terms}
        return value not in other_operands and value not in inside and self._is_judged(value)

    def _is_judged(self, value: Value) -> bool:
        """True if a position is a sum of digits, each of an index or of a value that depends on no index."""
        return all(d.value in self._axes or not self._depends(d.value) for d in self._sums.of(value).strides)

    def _depends(self, value: Value) -> bool:
        op = self._defined.get(value)
        return value in self._axes or (op is not None and _moves(op) and any(map(self._depends, op.operands)))

    def _compares_with_extent(self, op: Op, index: Value) -> bool:
        """True for `position < extent` and `position >= 0`: a part and the whole agree about them."""
        if not isinstance(op, Elementwise) or op.function not in ("lt", "ge"):
            return False
        axis = self._axes[index].axis
        limit = self._constant(op.operands[1])
        return limit == (axis.extent if op.function == "lt" else 0) and self._is_lane_of(op.operands[0], index)

    def _constant(self, value: Value) -> int | None:
        op = self._defined.get(value)
        if isinstance(op, (Broadcast, Reshape)):
            return self._constant(op.operands[0])
        if isinstance(op, Constant) and op.array.shape == () and kind_of(op.array.dtype) in ("signed", "unsigned"):
            return int(op.array)
        return None

    def _is_lane_of(self, value: Value, index: Value) -> bool:
        """True if a value holds the positions of the lanes of a tile along an axis."""
        axis, op = self._axes[index].axis, self._defined.get(value)
        if isinstance(op, (Reshape, Transpose)) or (isinstance(op, Broadcast) and op.operands[0].tile.shape):
            return self._is_lane_of(op.operands[0], index)
        position = self._sums.of(value)
        lanes = [d for d in position.strides if d.value.tile.shape]
        plain = {Digit(index): axis.block, **dict.fromkeys(lanes, 1)}
        if dict(position.strides) != plain or position.const or len(lanes) > 1:
            return False
        return all(self._is_iota(d.value) and d.value.tile.size <= axis.block for d in lanes)

    def _is_iota(self, value: Value) -> bool:
        return isinstance(self._defined.get(value), Iota)

    # --- axes of the same dims ---------------------------------------------------------------------------------------

    def _merged(self) -> list[_Axis]:
        """All axes; axes of folds over the same dims are merged."""
        merged_axes: list[_Axis] = []
        for axis in self._axes.values():
            merged = axis
            for twin in [twin for twin in merged_axes if not twin.dims.isdisjoint(axis.dims)]:
                merged_axes.remove(twin)
                if not (twin.folds and merged.folds):
                    shared = self._func.params[min(twin.dims & merged.dims)[0]].name
                    merged.reason = merged.reason or f"{shared} is read along {twin.axis.name}, too"
                merged = twin.with_twin(merged)
            merged_axes.append(merged)
        return merged_axes

    def _refused(self, axis: _Axis) -> str:
        whole = next((reason for place, reason in self._whole.items() if place in axis.dims), None)
        params = [number for number, _ in axis.dims]
        inputs = {n for n in params if self._func.params[n].ref.role in ("in", "inout")}
        if whole is not None:
            return whole
        if not inputs:
            return "no input has a dim of its extent"
        if len(set(params)) < len(params):
            return "an array has two dims of it"
        return (self._carried(axis) if axis.folds else self._unstored(axis)) or self._sized(axis) or self._aligned(axis)

    def _aligned(self, axis: _Axis) -> str:
        """The reason why an axis cannot be cut inside of tiles; "" if it can, or if only whole tiles are divided."""
        blocks = {a.block for a in axis.indices.values()}
        axis.is_elementwise = blocks == {1}
        if axis.is_elementwise or self._with_other_blocks:
            return ""
        if len(blocks) == 1 and axis.is_exact:
            dims = [(self._func.params[number], n) for number, n in axis.dims]
            if lanes_are_independent(self._func, axis.indices, dims, axis.comparisons, self._ranges):
                axis.is_elementwise = True
                return ""
        if any(a.extent % a.block for a in axis.indices.values()):
            return "the lanes of a tile are combined, and its tiles are not all whole"
        axis.sizes.extend(a.tiles for a in axis.indices.values())
        return ""

    def _sized(self, axis: _Axis) -> str:
        """The reason why an axis cannot be divided: its extent is used for more than its ends and comparisons."""
        compared = [op.operands[1] for op in axis.comparisons if isinstance(op, Elementwise) and op.function == "lt"]
        stops = [self._defined.get(fold.stop) for fold in axis.folds]
        selects = [op for op in stops if isinstance(op, Select)]
        if not all(self._is_for(op.result, axis.folds) for op in selects):
            return "the body computes with the end of a loop over it"
        ends = [*map(self._defined.get, (*compared, *(op.operands[1] for op in selects))), *stops]
        while any(isinstance(op, (Broadcast, Reshape)) for op in ends):
            ends = [self._defined.get(op.operands[0]) if isinstance(op, (Broadcast, Reshape)) else op for op in ends]
        axis.extents = {op for op in ends if isinstance(op, Constant)}
        uses = {*axis.comparisons, *axis.folds, *selects}
        for constant in axis.extents:
            if not self._is_for(constant.result, uses):
                return "the body computes with its size"
        return ""

    def _is_for(self, value: Value, uses: Collection[Op]) -> bool:
        """True if a number, and each tile filled with it, is only used as the second operand of the ops `uses`."""
        return all(
            self._is_for(op.result, uses)
            if isinstance(op, (Broadcast, Reshape))
            else op in uses and op.operands[1] is value and op.operands.count(value) == 1
            for op in self._users[value]
        )

    def _unstored(self, axis: _Axis) -> str:
        """The reason why an axis of the grid cannot be divided: an output that has no dim of it and is no sum."""
        writes = [op for op in self._func.walk() if isinstance(op, WriteOp)]
        for param in self._apart(axis):
            adds = all(isinstance(op, Atomic) and op.kind == "add" for op in writes if op.ref is param)
            if not adds or param.ref.role != "sum" or kind_of(param.ref.dtype) != "float":
                return f"{param.name} has no dim of its extent, and is no tk.Sum of floats"
        return ""

    def _carried(self, axis: _Axis) -> str:
        """The reason why an axis of folds cannot be divided: a loop that carries more than sums."""
        if not all(map(self._is_whole, axis.folds)):
            return "a loop goes over a part of it"
        summed = addends(self._func, axis.folds)
        if any(fold.results for fold in axis.folds) and (summed is None or self._stores_inside(axis)):
            return "a loop over it carries values that are not sums alone"
        unsummed = [param.name for param in self._apart(axis) if param not in (summed or ())]
        return f"{unsummed[0]} has no dim of its extent, and is no sum over it" if unsummed else ""

    def _is_whole(self, fold: Fold) -> bool:
        """True if a fold runs all tiles of its axis, or none, as from 0 to select(x, extent, 0)."""
        stop = self._defined.get(fold.stop)
        stops = stop.operands[1:] if isinstance(stop, Select) else (fold.stop,)
        limits = [self._sums.of(v) for v in (fold.start, *stops)]
        return limits == [Sum({}, n) for n in (0, fold.axis.extent, 0)[: len(limits)]]

    def _apart(self, axis: _Axis) -> list[Value]:
        """The outputs that have no dim which is divided with an axis."""
        divided = {number for number, _ in axis.dims}
        return [p for p in self._func.outputs if self._numbers[p] not in divided]

    def _stores_inside(self, axis: _Axis) -> bool:
        return any(isinstance(op, WriteOp) for fold in axis.folds for op in fold.body.walk())

    def _factor(self, axis: _Axis) -> Factor:
        partial = {self._numbers[param] for param in self._apart(axis)}
        indices, extents = frozenset(axis.indices), frozenset(axis.extents)
        return Factor(
            axis.axis.name,
            frozenset(axis.sizes),
            frozenset(axis.dims),
            frozenset(partial),
            indices,
            extents,
            axis.is_elementwise,
        )


def _moves(op: Op) -> bool:
    """True for arithmetic on positions, and for moves of their lanes."""
    if isinstance(op, Convert):
        return kind_of(op.dtype) in ("signed", "unsigned")
    arithmetic = isinstance(op, Elementwise) and op.function in ("add", "sub", "mul", "neg", "div", "rem")
    return arithmetic or isinstance(op, (Broadcast, Reshape, Transpose))


def _named(op: Op) -> str:
    return op.function if isinstance(op, Elementwise) else op.name


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for op in block.walk():
        yield from op.regions
