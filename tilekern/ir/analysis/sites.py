"""The places where a Func writes to its arrays, and proofs about them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value, definitions
from tilekern.ir.memory import Atomic, Dim, WriteOp
from tilekern.ir.records import record


@record
class Site:
    """A write, mostly an addition to a sum.

    Attributes:
      op: the write.
      path: the loops and switches around it, the outermost first, each with the block that leads to it.
      axes: the axes of the grid and of the folds around it, by index.
    """

    op: WriteOp
    path: tuple[tuple[Op, Block], ...]
    axes: dict[Value, Axis]

    @property
    def used(self) -> set[Value]:
        """The indices that the access depends on."""
        return {v for v in self.op.positions if v in self.axes}

    @property
    def regular(self) -> bool:
        """True if each dim is a block or an index, at a sum of strides times indices."""
        dims = self.op.access.dims
        plain = all(d.kind in ("block", "index") and all(t.plain for t in d.position.terms) for d in dims)
        return plain and all(v in self.axes for v in self.op.positions)


def sites(func: Func) -> list[Site]:
    """The additions to sums, in program order."""
    return [site for site in writes(func) if isinstance(site.op, Atomic) and site.op.ref.ref.role == "sum"]


def writes(func: Func) -> list[Site]:
    """All writes, in program order."""
    grid = dict(zip(func.body.args, func.axes, strict=True))
    return list(_sites(func.body, (), grid))


def _sites(block: Block, path: tuple[tuple[Op, Block], ...], axes: dict[Value, Axis]) -> Iterator[Site]:
    for op in block.ops:
        if isinstance(op, WriteOp):
            yield Site(op, path, axes)
        for region in op.regions:
            inside = {**axes, region.args[0]: op.axis} if isinstance(op, Fold) else axes
            yield from _sites(region, (*path, (op, region)), inside)


def is_injective(site: Site, over: Collection[Value]) -> bool:
    """True if different tiles of the axes `over` never touch the same element."""
    if not site.regular:
        return False
    apart: set[Value] = set()
    for dim in site.op.access.dims:
        apart |= _apart(site, dim)
    return all(index in apart or site.axes[index].tiles == 1 for index in over)


def _apart(site: Site, dim: Dim) -> set[Value]:
    """The indices whose tiles lie apart along a dim: each stride is at least the reach of all smaller strides."""
    apart: set[Value] = set()
    reach = dim.size
    for term in sorted(dim.position.terms, key=lambda t: abs(t.stride)):
        index = site.op.positions[term.operand]
        if site.axes[index].tiles == 1:
            continue
        if term.stride < reach or index in apart:
            return set()
        apart.add(index)
        reach += term.stride * (site.axes[index].tiles - 1)
    return apart


def is_covering(site: Site, func: Func) -> bool:
    """True if each element of the array is touched, for any inputs."""
    if not site.regular or site.op.masked:
        return False
    defined = definitions(func)
    if not all(isinstance(op, Fold) and runs_whole(op, defined) for op, _ in site.path):
        return False
    used = [site.op.positions[t.operand] for dim in site.op.access.dims for t in dim.position.terms]
    if len(set(used)) < len(used):
        return False  # a diagonal
    pairs = zip(site.op.access.dims, site.op.extents, strict=True)
    return all(_covers(site, dim, extent) for dim, extent in pairs)


def _covers(site: Site, dim: Dim, extent: int) -> bool:
    reach = dim.size
    for term in sorted(dim.position.terms, key=lambda t: abs(t.stride)):
        if not 0 < term.stride <= reach:
            return False
        reach += term.stride * (site.axes[site.op.positions[term.operand]].tiles - 1)
    return dim.position.const <= 0 and dim.position.const + reach >= extent


def runs_whole(fold: Fold, defined: Mapping[Value, Op]) -> bool:
    """True if a fold runs all tiles of its axis, whatever the inputs are."""
    start, stop = (_number(v, defined) for v in (fold.start, fold.stop))
    return start is not None and start <= 0 and stop is not None and stop >= fold.axis.extent


def _number(value: Value, defined: Mapping[Value, Op]) -> int | None:
    op = defined.get(value)
    return int(op.array) if isinstance(op, Constant) and op.array.shape == () else None
