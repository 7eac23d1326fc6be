"""Reductions and scans, in terms of the sums, maxima and minima of float32 and int32 that Mosaic has.

reduce                 one dim after the other; to a scalar, the last two at once
reduce prod, and, ...  combine the upper half with the lower one, until one element is left
linear_scan            row after row along a dim of whole registers; else as scan, with pairs of a factor and a term
scan                   combine element i with i - 1, then with i - 2, i - 4, ... (Hillis and Steele)
arg_reduce             the least index of an element that equals the extreme
"""

from __future__ import annotations

import math
from typing import Any

from tilekern.ir.compute import Monoid, Reduce, combining, identity
from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan
from tilekern.ir.types import F32, I32, TileType, kind_of
from tilekern.lower.mosaic.legalize.movement import filled, lanes


def reduce(make: Make, op: Reduce) -> Value:
    """A reduction of 32-bit elements."""
    (x,) = op.operands
    dims = sorted(op.dims)
    if x.tile.dtype not in (F32, I32) and op.monoid in ("sum", "max", "min"):
        return _unsigned(make, op, x)
    if op.monoid not in ("sum", "max", "min"):
        for dim in dims:
            x = _folded(make, x, op.monoid, dim)
        return make.reshape(x, op.result.tile.shape)
    rank = len(x.tile.shape)
    if rank == 1 and dims:
        x, dims, rank = make.reshape(x, (1, *x.tile.shape)), [0, 1], 2
    while rank > 2 and dims and (rank > len(dims) or len(dims) > 2):
        x, rank = make.reduce(x, op.monoid, dims.pop()), rank - 1
    while dims and rank > len(dims):
        x, rank = make.reduce(x, op.monoid, dims.pop()), rank - 1
    return make.add(Reduce, x, monoid=op.monoid, dims=tuple(dims)) if dims else x


def _unsigned(make: Make, op: Reduce, x: Value) -> Value:
    """A reduction of uint32 as int32: sums wrap around alike; maxima and minima flip the highest bit, for the order."""
    flips = op.monoid != "sum"
    number = make.bitcast(make.of("xor", x, 1 << 31) if flips else x, I32)
    signed = Reduce(operands=(number,), monoid=op.monoid, dims=op.dims)
    result = make.bitcast(reduce(make, signed), x.tile.dtype)
    return make.of("xor", result, 1 << 31) if flips else result


def _folded(make: Make, x: Value, monoid: Monoid, dim: int) -> Value:
    """The reduction along `dim`, which stays as a dim of size 1."""
    function = combining(monoid)
    while (size := x.tile.shape[dim]) > 1:
        half = size // 2
        low, high = make.part(x, dim, 0, half), make.part(x, dim, half, 2 * half)
        last = make.part(x, dim, 2 * half, size)
        x = make.joined(dim, make.of(function, low, high), last) if size % 2 else make.of(function, low, high)
    return x


def scan(make: Make, op: Scan) -> Value:
    """A scan of 32-bit elements; the identity is shifted in."""
    (x,) = op.operands
    size, distance = x.tile.shape[op.dim], 1
    start: Any = -math.inf if op.monoid == "logsumexp" else identity(op.monoid, x.tile.dtype)
    while distance < size:
        x = _combined(make, op.monoid, _shifted(make, x, op, start, distance), x)
        distance *= 2
    return x


def _shifted(make: Make, x: Value, op: Scan | LinearScan, start: Any, distance: int) -> Value:
    """Value like x, moved by `distance` in the order of a scan: [1, 2, 3, 4] moved by 1 is [start, 1, 2, 3].

    A reverse scan moves x the other way: [1, 2, 3, 4] becomes [2, 3, 4, start].
    """
    fill = make.number(start, TileType((), x.tile.dtype))
    edge, size = filled(make, fill, x.tile.shape, op.dim, distance), x.tile.shape[op.dim]
    if op.reverse:
        return make.joined(op.dim, make.part(x, op.dim, distance, size), edge)
    return make.joined(op.dim, edge, make.part(x, op.dim, 0, size - distance))


def linear_scan(make: Make, op: LinearScan) -> Value:
    """A linear scan: of n elements n steps where they are in registers of their own, else 2 log2(n) with shifts."""
    factors, terms = op.operands
    size, distance = terms.tile.shape[op.dim], 1
    if op.dim < len(terms.tile.shape) - 2:
        return _by_rows(make, op)
    while distance < size:
        terms = make.of("add", make.of("mul", factors, _shifted(make, terms, op, 0, distance)), terms)
        if 2 * distance < size:
            factors = make.of("mul", factors, _shifted(make, factors, op, 1, distance))
        distance *= 2
    return terms


def _by_rows(make: Make, op: LinearScan) -> Value:
    factors, terms = op.operands
    size = terms.tile.shape[op.dim]
    state: Value | None = None
    states: list[Value] = []
    for i in range(size)[:: -1 if op.reverse else 1]:
        factor, term = (make.part(x, op.dim, i, i + 1) for x in (factors, terms))
        state = term if state is None else make.of("add", make.of("mul", factor, state), term)
        states.append(state)
    return make.joined(op.dim, *states[:: -1 if op.reverse else 1]) if states else terms


def _combined(make: Make, monoid: str, x: Value, y: Value) -> Value:
    if monoid != "logsumexp":
        return make.of(combining(monoid), x, y)
    # log(exp(x) + exp(y)); equal infinities have no difference.
    most = make.of("max", x, y)
    distance = make.select(make.of("eq", x, y), 0.0, make.of("abs", make.of("sub", x, y)))
    return make.of("add", most, make.of("log1p", make.of("exp", make.of("neg", distance))))


def arg_reduce(make: Make, op: ArgReduce) -> Value:
    """The first index of the extreme; NaN counts as the extreme."""
    (x,) = op.operands
    shape, dim = x.tile.shape, op.dim
    if len(shape) == 1:
        row = ArgReduce(operands=(make.reshape(x, (1, *shape)),), extreme=op.extreme, dim=1)
        return make.reshape(arg_reduce(make, row), ())
    extreme = reduce(make, Reduce(operands=(x,), monoid=op.extreme, dims=(dim,)))
    row_dims = tuple(d for d in range(len(shape)) if d != dim)
    hit = make.of("eq", x, make.broadcast(extreme, shape, row_dims))
    if kind_of(x.tile.dtype) == "float":
        hit = make.of("or", hit, make.of("ne", x, x))
    place = make.select(hit, lanes(make, shape, dim), shape[dim])
    return make.reduce(place, "min", dim)
