"""The axes of the grid along which programs may add to the same elements of an array."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Atomic, Dim


def sum_axes(func: Func, param: Value) -> tuple[int, ...]:
    """The numbers of the axes along which programs may update the same elements of a param.

    Programs whose indices differ along any other axis update different elements.
    """
    updates = [op for op in func.walk() if isinstance(op, Atomic) and op.ref is param]
    if not updates:
        return ()
    tiles = {arg: axis.tiles for arg, axis in zip(func.body.args, func.axes, strict=True)}
    # A dim separates the programs of all updates only where they touch the same elements along it.
    first = updates[0]
    if any(op.extents != first.extents for op in updates):
        return tuple(range(len(func.body.args)))
    dims = [d for n, d in enumerate(first.access.dims) if len({_places(op, n) for op in updates}) == 1]
    return tuple(
        n for n, index in enumerate(func.body.args) if not any(_separated_by(dim, first, index, tiles) for dim in dims)
    )


def _places(op: Atomic, number: int) -> tuple[object, ...]:
    """The elements that an update touches along a dim, as a key: equal keys mean the same elements."""
    dim = op.access.dims[number]
    terms = ((t.stride, t.div, t.mod, op.positions[t.operand]) for t in dim.position.terms)
    return dim.kind, dim.size, dim.position.const, *terms


def _separated_by(dim: Dim, op: Atomic, index: Value, tiles: Mapping[Value, int]) -> bool:
    """True if programs with different indices along one axis touch different elements along `dim`.

    The position is a number in mixed radix: its digits are unique if each stride is at least the reach of all smaller
    terms together.
    """
    terms = [(abs(t.stride), op.positions[t.operand], t.plain) for t in dim.position.terms]
    all_indices = all(plain and value in tiles for _, value, plain in terms)
    once = len({value for _, value, _ in terms}) == len(terms)
    if dim.kind in ("gather", "along") or not all_indices or not once or index not in {v for _, v, _ in terms}:
        return False
    reach = dim.size
    for stride, value, _ in sorted(terms, key=lambda term: term[0]):
        if stride < reach:
            return False
        reach = stride * (tiles[value] - 1) + reach
    return True
