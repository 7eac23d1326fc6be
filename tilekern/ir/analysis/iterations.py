"""The mean number of iterations of a fold, by its bounds in many programs at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from tilekern.ir.analysis.ranges import Interval, analyze, whole
from tilekern.ir.compute import Convert, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load

_POINTS = 1024
_FAR = 2**53  # beyond every axis, and exact in float64
_LANES = 1 << 14  # of a tile that a bound is computed from


class Iterations:
    """The mean numbers of iterations of the folds of a Func.

    The bounds of a fold are computed from leaves: indices of the grid and of outer folds, and data. If there are few
    combinations of the leaves' values, all are tried, else a sample, the same each time. Data count as drawn evenly and
    independently from their proved range; without a proof, from the axis of the fold. Tiles of `arrays`, by param, have
    the elements of the array, so sums of such tiles are exact.
    """

    def __init__(self, func: Func, arrays: Mapping[Value, Array] | None = None) -> None:
        self._ranges, self._arrays = analyze(func), arrays or {}
        self._computed: dict[Value, Op] = {}
        for op in func.walk():
            if self._is_computed(op):
                self._computed[op.result] = op
        self._indices = {*func.body.args, *(op.body.args[0] for op in func.walk() if isinstance(op, Fold))}

    def is_known(self, op: Fold) -> bool:
        """True if the bounds of a fold depend on indices and known data alone."""
        return all(v in self._computed or v in self._indices for v in self._needed(op))

    def of(self, op: Fold) -> float:
        """The mean number of iterations of a fold; the last tile counts by its part inside of the extent."""
        needed = self._needed(op)
        leaves = {v: self._interval(v, op.axis) for v in needed if v not in self._computed}
        values = _samples(leaves)
        with np.errstate(all="ignore"):
            for value, op_of_value in self._computed.items():  # in program order: operands come before results
                if value in needed:
                    values[value] = self._evaluated(op_of_value, values)
        return _mean(op.axis, values[op.start], values[op.stop])

    def _needed(self, op: Fold) -> Collection[Value]:
        """The bounds of a fold, and all values that they are computed from."""
        needed, pending = dict[Value, None](), [op.start, op.stop]  # a dict, which keeps their order in every process
        while pending:
            value = pending.pop()
            if value not in needed:
                needed[value] = None
                pending += _origins(self._computed[value]) if value in self._computed else ()
        return needed

    def _is_computed(self, op: Op) -> bool:
        """True for an op whose value follows from scalars, and from tiles that are known."""
        if len(op.results) != 1 or op.regions or math.prod(op.result.tile.shape) > _LANES:
            return False
        if isinstance(op, Load):
            is_plain = op.mask is None and op.fill is None and all(d.kind in ("block", "index") for d in op.access.dims)
            return is_plain and op.ref in self._arrays
        return op.pure and all(v in self._computed or not v.tile.shape for v in op.operands)

    def _evaluated(self, op: Op, values: Mapping[Value, Array]) -> Array:
        """The value of an op in all programs, which are the first dim; without that dim if all have the same."""
        function = self._loaded(op) if isinstance(op, Load) else op.evaluate
        origins = [(values[v], values[v].ndim > len(v.tile.shape)) for v in _origins(op)]
        several = [len(array) for array, differs in origins if differs]
        if not several or (isinstance(op, Elementwise | Select | Convert) and not op.result.tile.shape):
            return np.asarray(function(*(array for array, _ in origins)))  # the programs of scalars are like lanes
        programs = np.empty((several[0], *op.result.tile.shape), op.result.tile.dtype)
        for n in range(several[0]):
            programs[n] = function(*(array[n] if differs else array for array, differs in origins))
        return programs

    def _loaded(self, op: Load) -> Callable[..., Array]:
        """The function from the positions of a load in a program to its tile; lanes outside of the array are 0."""
        array = self._arrays[op.ref].reshape(op.extents)

        def loaded(*positions: Array) -> Array:
            lanes = [
                np.arange(dim.size)
                + dim.position.const
                + sum(t.stride * t.digit(positions[t.operand].astype(np.int64)) for t in dim.position.terms)
                for dim in op.access.dims
            ]
            inside = [(lane >= 0) & (lane < length) for lane, length in zip(lanes, op.extents, strict=True)]
            places = [np.where(within, lane, 0) for within, lane in zip(inside, lanes, strict=True)]
            tile = np.where(functools.reduce(np.multiply.outer, inside), array[np.ix_(*places)], 0)
            return tile.astype(array.dtype).reshape(op.result.tile.shape)

        return loaded

    def _interval(self, leaf: Value, axis: Axis) -> Interval:
        limits = whole(leaf.tile.dtype)
        unproved = Interval(0, axis.extent if limits is None else min(axis.extent, limits.high))
        interval = self._ranges.get(leaf, unproved)
        return Interval(*(min(max(end, -_FAR), _FAR) for end in (interval.low, interval.high)))


def _origins(op: Op) -> Sequence[Value]:
    """The values that the result of an op is computed from."""
    return op.positions if isinstance(op, Load) else op.operands


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
