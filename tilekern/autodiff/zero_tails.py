"""Choose 0 for tangents and cotangents of lanes behind the end of an array, before lanes are combined.

A tangent, or a cotangent, reads 0 behind the end. Ops on each lane by itself keep it 0 in exact arithmetic, for they
are linear. But a factor may be infinite there: `x / y` reads y = 0 behind the end, and 0 · 1/0 is NaN. No store writes
such lanes, but a sum over lanes would add them:

    %0 = load %out_ct[4*%i +: 4]   %1 = div(%0, %y)   %2 = reduce sum %1
  → where the extent of %i is no multiple of 4
    %0 = load %out_ct[4*%i +: 4]   %1 = div(%0, %y)   %3 = select(4*%i + iota < extent, %1, 0)   %2 = reduce sum %3

Needs: a Func that is linear in some inputs. Gives: sums, products, scans and moves of lanes whose lanes behind the end
are 0 if the inputs are 0 there. A Func whose tiles are all whole stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilekern.ir.analysis.additive import is_zero
from tilekern.ir.analysis.lanes import kept_places
from tilekern.ir.carries import carries
from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Axis, Block, Func, Op, Value, definitions
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Load, MemoryOp, WriteOp
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Transpose
from tilekern.ir.types import kind_of

# A dim of a tile, and the index of the axis whose tiles it holds.
type _End = tuple[int, Value]

_POINTWISE = (Elementwise, Select, Convert, Stop, Custom)
_FINITE = frozenset(("add", "sub", "mul", "neg", "abs", "max", "min", "sign", "sin", "cos", "tanh", "logistic", "erf"))
"""Elementwise functions of floats that are finite where their operands are, but for overflow."""


def zero_tails(func: Func, roots: Collection[Value]) -> Func:
    """Apply the rewrite above.

    Args:
      func: the Func.
      roots: the inputs in which the Func is linear, all together.
    """
    axes = _partial_axes(func)
    if not axes:
        return func
    facts = _Facts(func, roots, axes)
    return _Masker(facts, axes).run(func)


def _partial_axes(func: Func) -> dict[Value, Axis]:
    """Maps the index of each axis whose last tile reaches over the end to the axis."""
    axes = dict(zip(func.body.args, func.axes, strict=True))
    axes |= {op.body.args[0]: op.axis for op in func.walk() if isinstance(op, Fold)}
    return {index: a for index, a in axes.items() if a.extent % a.block and a.extent + a.block < 2**31}


@record
class _Linear:
    """A value that is linear in the roots.

    Attributes:
      ends: the dims along which lanes behind the end of an axis are 0 in exact arithmetic; None for a tile of zeros.
      is_exact: True if these lanes are 0 as they are computed, too.
    """

    ends: frozenset[_End] | None
    is_exact: bool = True

    def along(self, places: Mapping[int, int]) -> _Linear:
        """The fact after an op that moves each dim in `places` to its new place, and may mix lanes of other dims."""
        if self.ends is None:
            return self
        return replace(self, ends=frozenset((places[d], index) for d, index in self.ends if d in places))


class _Facts:
    """Facts of the values of a Func.

    Attributes:
      linear: the fact of each value that is linear in the roots.
      finite: values not linear in the roots that are finite if all elements of arrays are, but for overflow.
    """

    def __init__(self, func: Func, roots: Collection[Value], axes: Mapping[Value, Axis]) -> None:
        self._roots, self._axes, self._defined = {*roots}, axes, definitions(func)
        self.linear: dict[Value, _Linear] = {}
        self.finite: set[Value] = set()
        self._block(func.body)

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if isinstance(op, Fold):
                self._fold(op)
            elif isinstance(op, Load):
                self._load(op)
            elif isinstance(op, Switch):
                for region in op.regions:
                    self._block(region)
                for n, result in enumerate(op.results):
                    self._note(result, self._meet([self._of(region.results[n]) for region in op.regions]))
            elif op.regions:
                for region in op.regions:
                    self._block(region)
            elif not isinstance(op, WriteOp):
                for result in op.results:
                    self._computed(op, result)

    def _of(self, value: Value) -> _Linear | None:
        """The fact of a value; None if it is not linear in the roots."""
        return _Linear(None) if is_zero(value, self._defined) else self.linear.get(value)

    def _note(self, value: Value, linear: _Linear | None) -> None:
        self.linear.pop(value, None)
        if linear is not None:
            self.linear[value] = linear

    def _meet(self, facts: Sequence[_Linear | None]) -> _Linear | None:
        """The fact of a sum of values, or of a choice among values, from the facts of the values."""
        ends: frozenset[_End] | None = None
        for linear in facts:
            if linear is None:
                return None
            ends = linear.ends if ends is None else ends if linear.ends is None else ends & linear.ends
        return _Linear(ends, all(linear.is_exact for linear in facts if linear is not None))

    def _fold(self, op: Fold) -> None:
        for carry in carries(op):
            self._note(carry.args[0], self._of(carry.init))
        changes = True
        while changes:  # each iteration removes dims
            self._block(op.body)
            changes = False
            for carry in carries(op):
                before = self.linear.get(carry.args[0])
                after = None if before is None else self._meet([before, self._of(carry.yielded)])
                if after is not None and after.ends is not None:  # the next tile has other lanes behind the end
                    after = replace(after, ends=frozenset(e for e in after.ends if e[1] is not op.body.args[0]))
                self._note(carry.args[0], after)
                changes = changes or before != after
        for carry in carries(op):
            self._note(carry.result, self.linear.get(carry.args[0]))

    def _load(self, op: Load) -> None:
        if op.ref not in self._roots:
            self.finite.add(op.result)
        elif op.fill is None or is_zero(op.fill, self._defined):
            pairs = zip(op.access.dims, op.access.lanes, op.extents, strict=True)
            ends = [(lane, self._index(op, n)) for n, (_, lane, extent) in enumerate(pairs) if extent]
            self.linear[op.result] = _Linear(frozenset((d, v) for d, v in ends if d is not None and v is not None))
        else:
            self.linear[op.result] = _Linear(frozenset())

    def _index(self, op: Load, number: int) -> Value | None:
        """The index of the axis whose tile a load takes whole along a dim; None if there is no such axis."""
        dim = op.access.dims[number]
        if dim.kind != "block" or dim.position.const or len(dim.position.terms) != 1 or dim.in_bounds:
            return None
        (term,) = dim.position.terms
        axis = self._axes.get(op.positions[term.operand])
        if axis is None or not term.plain or not term.stride == dim.size == axis.block:
            return None
        return op.positions[term.operand] if op.extents[number] == axis.extent else None

    def _computed(self, op: Op, result: Value) -> None:
        active = [linear for v in op.operands if (linear := self.linear.get(v)) is not None]
        if not active:
            if self._is_finite(op):
                self.finite.add(result)
            return
        factors = [v for v in op.operands if v not in self.linear]
        match op:
            case Stop() | Custom():
                self._note(result, self.linear.get(op.operands[0]))
            case Elementwise(function="add" | "sub"):
                self._note(result, self._meet([*map(self._of, op.operands)]))
            case Select():
                self._note(result, self._meet([*map(self._of, op.operands[1:])]))
            case Elementwise() | Convert():
                stays = op.function in ("mul", "neg") if isinstance(op, Elementwise) else kind_of(op.dtype) == "float"
                is_exact = active[0].is_exact and stays and self.finite.issuperset(factors)
                self._note(result, replace(active[0], is_exact=is_exact))
            case Broadcast() | Transpose() | Reshape():
                self._note(result, active[0].along(kept_places(op)))
            case Reduce():
                dims = [d for d in range(len(op.operands[0].tile.shape)) if d not in op.dims]
                self._note(result, active[0].along({d: n for n, d in enumerate(dims)}))
            case Dot() if len(active) == 1:
                is_exact = active[0].is_exact and self.finite.issuperset(factors)
                self._note(
                    result, replace(active[0].along(_places_of_dot(op, op.operands[0] in factors)), is_exact=is_exact)
                )
            case _:
                self._note(result, _Linear(frozenset()))

    def _is_finite(self, op: Op) -> bool:
        """True if the result of an op is finite where arrays are; no operand is linear in the roots."""
        if isinstance(op, Constant):
            return kind_of(op.array.dtype) != "float" or bool(np.isfinite(op.array.astype(np.float64)).all())
        moves = isinstance(op, (Select, Convert, Stop, Broadcast, Transpose, Reshape, Reduce, Dot))
        is_finite = moves or (isinstance(op, Elementwise) and op.function in _FINITE)
        floats = (v for v in op.operands if kind_of(v.tile.dtype) == "float")
        return is_finite and self.finite.issuperset(floats)


def _places_of_dot(op: Dot, is_right: bool) -> dict[int, int]:
    """Maps each dim of an operand that is a dim of the result to its place in the result."""
    side = 1 if is_right else 0
    begin = len(op.batch[0]) + (len(op.free(0)) if is_right else 0)
    return {d: n for n, d in enumerate(op.batch[side])} | {d: begin + n for n, d in enumerate(op.free(side))}


class _Masker(Rewriter):
    """Copies a Func; lanes behind the end become 0 before an op combines lanes."""

    def __init__(self, facts: _Facts, axes: Mapping[Value, Axis]) -> None:
        super().__init__(lambda op, rewriter: None)
        self._facts, self._axes = facts, axes

    def visit(self, op: Op) -> Sequence[Value]:
        operand_copies = {v: self.value(v) for v in op.operands}
        for value, ends in self._combined(op).items():
            self.replace(value, self._masked(operand_copies[value], ends, op))
        results = super().visit(op)
        for value, current in operand_copies.items():
            self.replace(value, current)
        return results

    def _combined(self, op: Op) -> dict[Value, frozenset[_End]]:
        """Maps each operand whose lanes an op combines, and that may not be 0 behind the end, to the ends to mask."""
        if isinstance(op, (MemoryOp, *_POINTWISE, Broadcast, Transpose)) or op.regions:
            return {}
        if isinstance(op, Dot):
            return self._contracted(op)
        masks: dict[Value, frozenset[_End]] = {}
        for value in op.operands:
            linear = self._facts.linear.get(value)
            if linear is None or linear.ends is None or linear.is_exact:
                continue
            stays = kept_places(op) if isinstance(op, Reshape) else {}
            dims = op.dims if isinstance(op, Reduce) else range(len(value.tile.shape))
            masks[value] = frozenset(end for end in linear.ends if end[0] in dims and end[0] not in stays)
        return {value: ends for value, ends in masks.items() if ends}

    def _contracted(self, op: Dot) -> dict[Value, frozenset[_End]]:
        """The ends to mask of both operands of a product: 0 times infinity is NaN, too."""
        masks: dict[Value, frozenset[_End]] = {}
        for side, partner in ((0, 1), (1, 0)):
            x, y = op.operands[side], op.operands[partner]
            linear = self._facts.linear.get(x)
            if linear is None or linear.ends is None:
                continue
            partners = dict(zip(op.contract[side], op.contract[partner], strict=True))
            ends = frozenset(end for end in linear.ends if end[0] in partners)
            if not linear.is_exact:
                masks[x] = ends
            if y not in self._facts.finite:
                masks[y] = frozenset((partners[d], index) for d, index in ends)
        return {value: ends for value, ends in masks.items() if ends}

    def _masked(self, x: Value, ends: frozenset[_End], op: Op) -> Value:
        make, shape = Make(self, op), x.tile.shape
        for dim, index in sorted(ends, key=lambda end: end[0]):
            axis = self._axes[index]
            first = make.of("mul", self.value(index), axis.block)
            lanes = make.of("add", make.broadcast(first, shape, ()), make.lanes(shape, dim))
            x = make.select(make.of("lt", lanes, axis.extent), x, 0)
        return x
