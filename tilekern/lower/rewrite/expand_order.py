"""Sorts and top-k by integer keys (`sort_key`): sort the positions by the keys, then take the elements there."""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.core import Value
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Iota, Slice
from tilekern.ir.types import I32
from tilekern.lower.rewrite.sort_key import sort_key


def expand_sort(make: Make, op: Sort, rewriter: Rewriter, key_of: Callable[[Make, Value], Value] = sort_key) -> Value:
    """The picked operand of a sort, taken at positions that a sort of integer keys finds."""
    places = _positions(make, [key_of(make, x) for x in op.operands[: op.num_keys]], op.dim)
    return places if picks_places(op, rewriter) else make.take(op.operands[op.pick], places, op.dim)


def expand_top_k(make: Make, op: TopK) -> Value:
    """The first positions of a sort by the inverted keys."""
    (x,) = op.operands
    places = _positions(make, [make.of("not", sort_key(make, x))], op.dim)
    start, stride = (0,) * len(x.tile.shape), (1,) * len(x.tile.shape)
    return make.add(Slice, places, start=start, stop=op.result.tile.shape, stride=stride)


def picks_places(op: Sort, rewriter: Rewriter) -> bool:
    """True if the picked operand of a sort is the numbers 0, 1, ... of each line."""
    definition, dim = rewriter.definition(op.operands[op.pick]), op.dim
    if isinstance(definition, Broadcast) and dim in definition.dims:
        definition, dim = rewriter.definition(definition.operands[0]), definition.dims.index(dim)
    return isinstance(definition, Iota) and definition.dtype == I32 and definition.dim == dim


def _positions(make: Make, keys: list[Value], dim: int) -> Value:
    """The positions of the elements in ascending order of the keys, equal keys in their order; int32."""
    lanes = make.lanes(keys[0].tile.shape, dim)
    return make.add(Sort, *keys, lanes, dim=dim, num_keys=len(keys), pick=len(keys))
