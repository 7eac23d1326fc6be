"""The mean number of iterations of a fold, by its bounds in many programs at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tilekern.ir.analysis.ranges import Interval, analyze, whole
from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load

_POINTS = 1024
_FAR = 2**53  # beyond every axis, and exact in float64


class Iterations:
    """The mean numbers of iterations of the folds of a Func.

    The bounds of a fold are computed from leaves: indices of the grid and of outer folds, and data. If there are few
    combinations of the leaves' values, all are tried, else a sample, the same each time. Data count as drawn evenly and
    independently from their proved range; without a proof, from the axis of the fold. Data that are loaded one by one
    from `arrays`, by param, are known.
    """

    def __init__(self, func: Func, arrays: Mapping[Value, Array] | None = None) -> None:
        self._ranges, self._arrays = analyze(func), arrays or {}
        self._scalars = {op.result: op for op in func.walk() if _is_scalar(op) or self._is_known(op)}
        self._indices = {*func.body.args, *(op.body.args[0] for op in func.walk() if isinstance(op, Fold))}

    def is_known(self, op: Fold) -> bool:
        """True if the bounds of a fold depend on indices and known data alone."""
        return all(v in self._scalars or v in self._indices for v in self._needed(op))

    def of(self, op: Fold) -> float:
        """The mean number of iterations of a fold; the last tile counts by its part inside of the extent."""
        needed = self._needed(op)
        leaves = {v: self._interval(v, op.axis) for v in needed if v not in self._scalars}
        values = _samples(leaves)
        with np.errstate(all="ignore"):
            for value, scalar in self._scalars.items():  # in program order: operands come before results
                if value in needed:
                    values[value] = self._evaluated(scalar, values)
        return _mean(op.axis, values[op.start], values[op.stop])

    def _needed(self, op: Fold) -> Collection[Value]:
        """The bounds of a fold, and all values that they are computed from."""
        needed, pending = dict[Value, None](), [op.start, op.stop]  # a dict, which keeps their order in every process
        while pending:
            value = pending.pop()
            if value not in needed:
                needed[value] = None
                pending += _origins(self._scalars[value]) if value in self._scalars else ()
        return needed

    def _is_known(self, op: Op) -> bool:
        """True for a load of one element of an array whose values are known."""
        if not isinstance(op, Load) or op.mask is not None or op.fill is not None:
            return False
        return op.result.tile.shape == () and op.ref in self._arrays

    def _evaluated(self, op: Op, values: Mapping[Value, Array]) -> Array:
        """The values of a scalar in all programs."""
        if not isinstance(op, Load):
            return op.evaluate(*(values[v] for v in op.operands))
        array, place, inside = self._arrays[op.ref].reshape(op.extents), list[Any](), np.bool_(True)
        for dim, length in zip(op.access.dims, op.extents, strict=True):
            position = dim.position.const + sum(
                t.stride * t.digit(values[op.positions[t.operand]].astype(np.int64)) for t in dim.position.terms
            )
            inside = inside & (position >= 0) & (position < length)
            place.append(np.clip(position, 0, length - 1))
        return np.where(inside, array[tuple(place)], 0).astype(array.dtype)

    def _interval(self, leaf: Value, axis: Axis) -> Interval:
        limits = whole(leaf.tile.dtype)
        unproved = Interval(0, axis.extent if limits is None else min(axis.extent, limits.high))
        interval = self._ranges.get(leaf, unproved)
        return Interval(*(min(max(end, -_FAR), _FAR) for end in (interval.low, interval.high)))


def _origins(op: Op) -> Sequence[Value]:
    """The scalars that a scalar is computed from."""
    return op.positions if isinstance(op, Load) else op.operands


def _is_scalar(op: Op) -> bool:
    return isinstance(op, Elementwise | Select | Convert | Constant) and op.result.tile.shape == ()


def _samples(leaves: dict[Value, Interval]) -> dict[Value, Array]:
    """Values of the leaves: all combinations, or a Latin hypercube (McKay, Beckman and Conover 1979); none if empty."""
    sizes = [max(0, leaf.high - leaf.low + 1) for leaf in leaves.values()]
    if math.prod(sizes) <= _POINTS:
        numbers = list(np.indices(sizes).reshape(len(sizes), math.prod(sizes)))
    else:
        random = np.random.default_rng(0)
        strata = [random.permutation(_POINTS) for _ in sizes]
        numbers = [((s + 0.5) * (size / _POINTS)).astype(np.int64) for s, size in zip(strata, sizes, strict=True)]
    return {v: (i.low + n).astype(v.tile.dtype) for (v, i), n in zip(leaves.items(), numbers, strict=True)}


def _mean(axis: Axis, start: Array, stop: Array) -> float:
    first, last = (np.clip(bound.astype(np.int64), 0, axis.extent) for bound in (start, stop))
    end = np.minimum(-(-last // axis.block) * axis.block, axis.extent)
    elements = np.maximum(0, end - first // axis.block * axis.block)
    return float(elements.mean()) / axis.block if elements.size else 0.0
