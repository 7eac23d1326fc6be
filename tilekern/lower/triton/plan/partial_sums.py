"""Partial sums of `tk.Sum`: the grid axes along which programs may add to the same elements, and how they add.

Programs that differ along such an axis add to partial sums of their own, which XLA adds up after the launch. Programs
that differ only along the other axes touch different elements, and share a partial sum. Where no element of a partial
sum gets two summands, summands are stored: nothing is loaded, and threads need not wait for each other.
"""

from __future__ import annotations

from math import prod

from tilekern.ir.analysis.sites import is_covering, is_injective, sites
from tilekern.ir.analysis.sum_axes import sum_axes
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.records import record


@record
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
    axes = sum_axes(func, param)
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
    param_sites = [site for site in sites(func) if site.op.ref is param]
    if len(accesses) != 1 or len(param_sites) != 1:
        return PartialSums(axes)
    (site,) = param_sites
    own = {func.body.args[n] for n in axes}
    counted = all(isinstance(op, (Fold, Switch)) for op, _ in site.path)
    stored = counted and is_injective(site, site.axes.keys() - own)
    return PartialSums(axes, stored, stored and own.isdisjoint(site.used) and is_covering(site, func))
