"""Barriers between accesses of one array, because a program may touch an element twice.

The threads of a program share out the elements of a tile, for each access in a way of its own. So two threads may
touch one element, and only a barrier orders them. Two accesses need none if they are proved to touch different
elements, or if their order changes nothing: two loads, or two atomic updates of one kind.

Positions are compared dim by dim. Along one dim, accesses lie apart if they begin at the same sum of indices plus
different constants, and the constants lie as far apart as the tiles are long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile

from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value
from tilekern.ir.memory import Atomic, Load, MemoryOp, Term
from tilekern.ir.records import record


@record
class _Place:
    """An access in the program.

    Attributes:
      op: the access.
      path: the ops around it, the outermost first, each with the block that leads to it.
      loops: the axis of each fold around it, by its index.
      variant: the values that are computed inside of a loop around it.
    """

    op: MemoryOp
    path: tuple[tuple[Op, Block], ...]
    loops: dict[Value, Axis]
    variant: frozenset[Value]


def barriers(func: Func) -> dict[Value, frozenset[Op]]:
    """Maps an output of a legal Func to the accesses, loops and branches that begin with a barrier, if any.

    An array that a program loads and writes has a barrier before each access. Of an array that it only writes, a
    barrier separates writes that may touch one element: it stands before the later write, or before the loop around
    the write. Updates of sums have barriers of their own.
    """
    places: dict[Value, list[_Place]] = {p: [] for p in func.outputs if p.ref.role != "sum"}
    _collect(func.body, (), {}, frozenset(), places)
    ops = {param: frozenset(_barriers(accesses)) for param, accesses in places.items()}
    return {param: param_ops for param, param_ops in ops.items() if param_ops}


def _collect(
    block: Block,
    path: tuple[tuple[Op, Block], ...],
    loops: dict[Value, Axis],
    variant: frozenset[Value],
    places: dict[Value, list[_Place]],
) -> None:
    for op in block.ops:
        if isinstance(op, MemoryOp) and op.ref in places:
            places[op.ref].append(_Place(op, path, loops, variant))
        for region in op.regions:
            inside = {**loops, region.args[0]: op.axis} if isinstance(op, Fold) else loops
            computed = frozenset[Value]() if isinstance(op, Switch) else _computed(region)
            _collect(region, (*path, (op, region)), inside, variant | computed, places)


def _computed(block: Block) -> frozenset[Value]:
    return frozenset((*block.args, *(result for op in block.walk() for result in op.results)))


def _barriers(places: Sequence[_Place]) -> Iterator[Op]:
    """The ops before which the accesses of one array need a barrier."""
    loads = [place for place in places if isinstance(place.op, Load)]
    if loads:
        yield from () if len(loads) == len(places) else (place.op for place in places)
        return
    yield from (place.op for place in places if not _commute(place, place) and not _is_apart_from_itself(place))
    for a, b in combinations(places, 2):
        if not _commute(a, b) and not _are_apart(a, b):
            yield from _between(a, b)


def _commute(a: _Place, b: _Place) -> bool:
    """True if both are atomic updates of one kind."""
    return isinstance(a.op, Atomic) and isinstance(b.op, Atomic) and a.op.kind == b.op.kind


def _is_apart_from_itself(place: _Place) -> bool:
    """True if the iterations of the loops around an access touch different elements."""
    if any(isinstance(op, While) for op, _ in place.path):
        return False
    dims = enumerate(place.op.access.dims)
    apart = frozenset[Value]().union(*(_separated(place, number, dim.size) for number, dim in dims))
    return all(index in apart or axis.tiles <= 1 for index, axis in place.loops.items())


def _between(a: _Place, b: _Place) -> Iterator[Op]:
    """The ops that need a barrier so that `b` comes behind `a`, and `a` of the next iteration of a loop behind `b`."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.path, b.path, strict=False)))
    first, second = ((*(op for op, _ in place.path), place.op)[shared] for place in (a, b))
    if first is not second:
        yield second
    if any(isinstance(op, Fold | While) for op, _ in a.path[:shared]):
        yield first


def _are_apart(a: _Place, b: _Place) -> bool:
    """True if two accesses never touch one element, whatever the iterations of the loops around them."""
    return any(_are_apart_along(a, b, number) for number in range(len(a.op.access.dims)))


def _are_apart_along(a: _Place, b: _Place, number: int) -> bool:
    dims = [place.op.access.dims[number] for place in (a, b)]
    if a.op.extents != b.op.extents or any(d.kind not in ("block", "index") for d in dims):
        return False
    terms = [Counter((t.stride, t.div, t.mod, value) for t, value in _terms(place, number)) for place in (a, b)]
    low, high = sorted(dims, key=lambda d: d.position.const)
    if terms[0] != terms[1] or low.position.const + low.size > high.position.const:
        return False
    reach = high.position.const + high.size - low.position.const
    moving = {value for _, value in _terms(a, number) if value in a.variant}
    return moving <= _separated(a, number, reach)


def _terms(place: _Place, number: int) -> list[tuple[Term, Value]]:
    return [(term, place.op.positions[term.operand]) for term in place.op.access.dims[number].position.terms]


def _separated(place: _Place, number: int, reach: int) -> frozenset[Value]:
    """The indices of loops whose tiles of `reach` elements lie apart along a dim; none if something else moves them."""
    indices = set[Value]()
    if place.op.access.dims[number].kind not in ("block", "index"):
        return frozenset()
    moving = [(term, value) for term, value in _terms(place, number) if value in place.variant]
    for term, index in sorted(moving, key=lambda pair: abs(pair[0].stride)):
        if index not in place.loops or not term.plain or abs(term.stride) < reach or index in indices:
            return frozenset()
        indices.add(index)
        reach += abs(term.stride) * (place.loops[index].tiles - 1)
    return frozenset(indices)
