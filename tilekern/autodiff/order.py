"""Permutations along a dim: the order of a sort, and its inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilekern.ir.core import Op, Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import I32

Define = Callable[[Value], Op | None]


def order_of(op: Sort, operands: Sequence[Value], make: Make) -> Value:
    """int32 indices along the dim of a sort, from which the sorted elements come: [30, 10, 20] -> [1, 2, 0]."""
    keys = operands[: op.num_keys]
    places = make.add(Iota, shape=keys[0].tile.shape, dtype=I32, dim=op.dim)
    return make.add(Sort, *keys, places, dim=op.dim, num_keys=op.num_keys, pick=op.num_keys)


def put_back(x: Value, order: Value, dim: int, make: Make) -> Value:
    """The elements of `x`, back at the places from which `order`, a permutation along `dim`, took them."""
    return make.add(Sort, order, x, dim=dim, num_keys=1, pick=1)


def is_permutation(indices: Value, dim: int, define: Define) -> bool:
    """True if a value holds each index along `dim` once, by proof: the order of a sort, or of a full top-k."""
    match op := define(indices):
        case TopK():
            return op.dim == dim and op.k == op.operands[0].tile.shape[dim]
        case Sort():
            return op.dim == dim and _is_iota(op.operands[op.pick], dim, define)
        case _:
            return False


def _is_iota(value: Value, dim: int, define: Define) -> bool:
    match op := define(value):
        case Iota():
            return op.dim == dim
        case Broadcast():
            inner = define(op.operands[0])
            return isinstance(inner, Iota) and op.dims[inner.dim] == dim and inner.shape[inner.dim] == op.shape[dim]
        case _:
            return False
