"""Tangents of scans and of products along dims, also where factors are 0."""

from __future__ import annotations

from math import prod

from tilekern.autodiff.elementwise import ROWS, Point, moved
from tilekern.ir.compute import combining
from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import Scan
from tilekern.ir.shape import Pad, Reverse, Slice
from tilekern.ir.types import TileType

_Pair = tuple[Value, Value]  # a value and its tangent


def other_factors(x: Value, dims: tuple[int, ...], make: Make) -> Value:
    """For each element, the product of all others along `dims`: (product of predecessors) × (product of successors)."""
    shape = x.tile.shape
    order = (*(d for d in range(len(shape)) if d not in dims), *dims)
    outer = tuple(shape[d] for d in order[: len(order) - len(dims)])
    rows = make.reshape(make.transpose(x, order), (*outer, prod(shape[d] for d in dims)))
    last = len(outer)
    predecessors = shifted(make.add(Scan, rows, monoid="prod", dim=last), last, 1, 1, make)
    successors = shifted(make.add(Scan, rows, monoid="prod", dim=last, reverse=True), last, -1, 1, make)
    product = make.reshape(make.of("mul", predecessors, successors), tuple(shape[d] for d in order))
    return make.transpose(product, tuple(order.index(d) for d in range(len(shape))))


def shifted(x: Value, dim: int, by: int, fill: float, make: Make) -> Value:
    """The elements of `x` moved by `by` along a dim; `fill` where no element comes."""
    if not x.tile.shape[dim]:
        return x
    low = tuple(by if d == dim else 0 for d in range(len(x.tile.shape)))
    number = make.number(fill, TileType((), x.tile.dtype))
    return make.add(Pad, x, number, low=low, high=tuple(-n for n in low), interior=(0,) * len(low))


def scanned(op: Scan, x: Value, tangent: Value, make: Make) -> Value:
    """The tangent of a scan that is no sum; `x` is its operand, in the dtype of the tangent.

    Neighbours are combined in a tree, as in `jax.lax.associative_scan`. The tree decides how ties share a tangent.
    """
    pair = (x, tangent)
    if op.reverse:
        pair = (make.add(Reverse, x, dims=(op.dim,)), make.add(Reverse, tangent, dims=(op.dim,)))
    _, scanned_tangent = _Tree(op, make).scan(pair)
    return make.add(Reverse, scanned_tangent, dims=(op.dim,)) if op.reverse else scanned_tangent


class _Tree:
    """A scan of pairs of a value and its tangent."""

    def __init__(self, op: Scan, make: Make) -> None:
        self._op, self._dim, self._make = op, op.dim, make

    def scan(self, pair: _Pair) -> _Pair:
        size = pair[0].tile.shape[self._dim]
        if size < 2:
            return pair
        odd = self.scan(self._combined(self._part(pair, 0, size - 1, 2), self._part(pair, 1, size, 2)))
        if size == 2:
            return self._interleaved(self._part(pair, 0, 1), odd, size)
        preceding = self._part(odd, 0, (size - 1) // 2)
        later_even = self._combined(preceding, self._part(pair, 2, size, 2))
        first = self._part(pair, 0, 1)
        even = (self._joined(first[0], later_even[0]), self._joined(first[1], later_even[1]))
        return self._interleaved(even, odd, size)

    def _part(self, pair: _Pair, start: int, stop: int, stride: int = 1) -> _Pair:
        """Every `stride`-th element from `start` to `stop`, of the value and the tangent."""
        shape = pair[0].tile.shape
        starts = tuple(start if d == self._dim else 0 for d in range(len(shape)))
        stops = tuple(stop if d == self._dim else n for d, n in enumerate(shape))
        strides = tuple(stride if d == self._dim else 1 for d in range(len(shape)))
        if (starts, stops, stride) == ((0,) * len(shape), shape, 1):
            return pair
        value, tangent = (self._make.add(Slice, v, start=starts, stop=stops, stride=strides) for v in pair)
        return value, tangent

    def _joined(self, *parts: Value) -> Value:
        return self._make.joined(self._dim, *parts)

    def _interleaved(self, even: _Pair, odd: _Pair, size: int) -> _Pair:
        value, tangent = (self._alternating(e, o, size) for e, o in zip(even, odd, strict=True))
        return value, tangent

    def _alternating(self, even: Value, odd: Value, size: int) -> Value:
        """Even and odd elements in turn: the sum of both, spread with zeros between."""
        zero = self._make.number(0, TileType((), even.tile.dtype))
        rank = len(even.tile.shape)
        spread: list[Value] = []
        for first, part in enumerate((even, odd)):
            after = size - first - (2 * part.tile.shape[self._dim] - 1)
            low, high, interior = (tuple(n * (d == self._dim) for d in range(rank)) for n in (first, after, 1))
            spread.append(self._make.add(Pad, part, zero, low=low, high=high, interior=interior))
        return self._make.of("add", *spread)

    def _combined(self, left: _Pair, right: _Pair) -> _Pair:
        (a, ga), (b, gb) = left, right
        if self._op.monoid == "logsumexp":
            value = self._logaddexp(a, b)
            terms = (self._make.of("mul", g, self._share(x, value)) for x, g in (left, right))
            return value, self._make.of("add", *terms)
        function = combining(self._op.monoid)
        value = self._make.of(function, a, b)
        tangent = moved(Point(self._make, function, (a, b), value), ROWS[function], (ga, gb))
        assert tangent is not None
        return value, tangent

    def _logaddexp(self, a: Value, b: Value) -> Value:
        of = self._make.of
        difference = of("sub", a, b)
        tail = of("log1p", of("exp", of("neg", of("abs", difference))))
        is_nan = of("ne", difference, difference)  # infinities of one sign, or NaN
        return self._make.select(is_nan, of("add", a, b), of("add", of("max", a, b), tail))

    def _share(self, x: Value, total: Value) -> Value:
        """exp(x - total), where positive infinities count as 0."""
        x, total = (self._make.select(self._make.of("eq", v, float("inf")), 0, v) for v in (x, total))
        return self._make.of("exp", self._make.of("sub", x, total))
