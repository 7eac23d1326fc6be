"""Partial sums of `tk.Sum`: the grid axes along which programs may add to the same elements, and how they add.

Programs that differ along such an axis add to partial sums of their own, which XLA adds up after the launch. Programs
that differ only along the other axes touch different elements, and share a partial sum. Where no element of a partial
sum gets two summands, summands are stored: nothing is loaded, and threads need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tilekern.ir.analysis.sites import is_covering, is_injective, sites
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Atomic, Dim, MemoryOp


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of an output.

    Attributes:
      axes: the numbers of the grid axes along which each program needs a partial sum of its own.
      stored: True if no element of a partial sum gets two summands.
      whole: True if each element is stored, so the buffer needs no zero fill.
    """

    axes: tuple[int, ...]
    stored: bool = False
    whole: bool = False

    def count(self, func: Func) -> int:
        """The number of partial sums."""
        return prod(func.grid[n] for n in self.axes)


def plan_partial_sums(func: Func, param: Value) -> PartialSums:
    """The partial sums of a sum of a legal Func."""
    axes = partial_sum_axes(func, param)
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
    param_sites = [site for site in sites(func) if site.op.ref is param]
    if len(accesses) != 1 or len(param_sites) != 1:
        return PartialSums(axes)
    (site,) = param_sites
    own = {func.body.args[n] for n in axes}
    counted = all(isinstance(op, (Fold, Switch)) for op, _ in site.path)
    stored = counted and is_injective(site, site.axes.keys() - own)
    return PartialSums(axes, stored, stored and own.isdisjoint(site.used) and is_covering(site, func))


def partial_sum_axes(func: Func, param: Value) -> tuple[int, ...]:
    """The numbers of the grid axes along which each program needs a partial sum of its own."""
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
