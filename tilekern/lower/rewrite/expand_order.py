"""Sorts and top-k: find positions by integer keys (`sort_key`), then take the elements."""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Slice
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.sort_key import sort_key


def expand_sort(make: Make, op: Sort) -> Value:
    """A sort → the operand asked for, at positions found by a sort of integer keys."""
    keys = [sort_key(make, x) for x in op.operands[: op.num_keys]]
    return make.take(op.operands[op.pick], _positions(make, keys, op.dim), op.dim)


def expand_top_k(make: Make, op: TopK) -> Value:
    """The first positions of a sort by the keys upside down."""
    (x,) = op.operands
    places = _positions(make, [make.of("not", sort_key(make, x))], op.dim)
    zeros, ones = (0,) * len(x.tile.shape), (1,) * len(x.tile.shape)
    return make.add(Slice, places, start=zeros, stop=op.result.tile.shape, stride=ones)


def _positions(make: Make, keys: list[Value], dim: int) -> Value:
    """Where the elements stand in ascending order of the keys, equal ones in their order; int32."""
    lanes = make.lanes(keys[0].tile.shape, dim)
    return make.add(Sort, *keys, lanes, dim=dim, num_keys=len(keys), pick=len(keys))
