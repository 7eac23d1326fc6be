"""The mean number of iterations of a fold, by its bounds in many programs at once."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from tilekern.ir.analysis.ranges import Interval, analyze, whole
from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Func, Op, Value
from tilekern.ir.elementwise import Elementwise

_POINTS = 1024
_FAR = 2**53  # beyond every axis, and exact in float64


class Iterations:
    """The mean numbers of iterations of the folds of a Func.

    The bounds of a fold are computed from leaves: indices of the grid and of outer folds, and data. If there are few
    combinations of the leaves' values, all are tried, else a sample, the same each time. Data count as drawn evenly and
    independently from their proved range; without a proof, from the axis of the fold.
    """

    def __init__(self, func: Func) -> None:
        self._ranges = analyze(func)
        self._scalars = {op.result: op for op in func.walk() if _is_scalar(op)}

    def of(self, op: Fold) -> float:
        """The mean number of iterations of a fold; the last tile counts by its part inside of the extent."""
        needed = self._needed(op)
        leaves = {v: self._interval(v, op.axis) for v in needed if v not in self._scalars}
        values = _samples(leaves)
        with np.errstate(all="ignore"):
            for value, scalar in self._scalars.items():  # in program order: operands come before results
                if value in needed:
                    values[value] = scalar.evaluate(*(values[v] for v in scalar.operands))
        return _mean(op.axis, values[op.start], values[op.stop])

    def _needed(self, op: Fold) -> Collection[Value]:
        """The bounds of a fold, and all values that they are computed from."""
        needed, pending = dict[Value, None](), [op.start, op.stop]  # a dict, which keeps their order in every process
        while pending:
            value = pending.pop()
            if value not in needed:
                needed[value] = None
                pending += self._scalars[value].operands if value in self._scalars else ()
        return needed

    def _interval(self, leaf: Value, axis: Axis) -> Interval:
        limits = whole(leaf.tile.dtype)
        unproved = Interval(0, axis.extent if limits is None else min(axis.extent, limits.high))
        interval = self._ranges.get(leaf, unproved)
        return Interval(*(min(max(end, -_FAR), _FAR) for end in (interval.low, interval.high)))


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
