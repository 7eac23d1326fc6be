"""Partition of the grid into tasks, and the copies of arrays that tasks update.

Sums of floats depend on the order of the additions. *Partial sums* are copies of the array: each belongs to a range of
the tiles along *axes of sums*, on which programs add to the same elements. Programs add to their copy in order, and XLA
adds the copies up after the call. If there is one copy, programs add to the array itself, unless the sums need a wider
dtype. Along all other axes programs touch different elements, so they share copies, and no choice depends on how many
such programs there are: a device that has a part of these axes adds up in the same order.

Updates of integers give the same result in any order. A *private copy* lies in the scratch memory of a thread. At its
end, a task merges the copy with the array, one task at a time. If elements are updated often, this is cheaper than
atomic instructions.

If programs only add tiles to rows, the tasks of a part may each process a *slice* of the columns: elements of different
columns are never added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import NamedTuple

from tilekern.ir.analysis.sites import writes
from tilekern.ir.analysis.sum_axes import sum_axes
from tilekern.ir.compute import Constant, Dot, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value, cdiv, round_up
from tilekern.ir.memory import Atomic, AtomicKind, MemoryOp, WriteOp
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import DType, TileType, accumulator, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import is_virtual

ALIGNMENT = 64
"""Alignment of private copies, in bytes."""


@record
class Runs:
    """Runs of consecutive programs: `groups` groups of `group` programs, each cut into runs of `length`.

    The last run of a group may be shorter.
    """

    groups: int
    group: int
    length: int

    @property
    def in_group(self) -> int:
        """Runs of a group."""
        return cdiv(self.group, max(self.length, 1))

    @property
    def count(self) -> int:
        """All runs."""
        return self.groups * self.in_group


class RunDigit(NamedTuple):
    """`stride` times a digit of the number n of a run: `n // div % mod`."""

    div: int
    mod: int
    stride: int


@record
class PartialSums:
    """The partial sums of an array that floats are added to: [count, *shape] of `dtype`."""

    ref: Value
    count: int
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all partial sums together."""
        return (self.count, *self.ref.ref.shape)


@record
class PrivateCopy:
    """A private copy of an array of integers.

    Attributes:
      ref: the array.
      kind: the kind of all its updates.
      offset: the offset of the copy in bytes, from the end of the plan's buffers.
    """

    ref: Value
    kind: AtomicKind
    offset: int

    @property
    def size(self) -> int:
        """Elements of the array."""
        return prod(self.ref.ref.shape)


@record
class TaskPartition:
    """The division of the programs of a Func into tasks.

    Attributes:
      axes: the axes of the grid, in the order in which programs are numbered.
      runs: the programs of each task.
      slices: the tasks of a run; each processes a slice of the columns.
      copy_digits: digits of the number of a run, whose sum is the number of its partial sum.
      partial_sums: the partial sums of each array that has some.
      in_place: the arrays of floats that programs add to themselves.
      private: the private copies.
    """

    axes: tuple[Axis, ...]
    runs: Runs
    slices: int = 1
    copy_digits: tuple[RunDigit, ...] = ()
    partial_sums: tuple[PartialSums, ...] = ()
    in_place: tuple[Value, ...] = ()
    private: tuple[PrivateCopy, ...] = ()

    @property
    def private_bytes(self) -> int:
        """Bytes of the private copies."""
        return sum(round_up(private.size * private.ref.ref.dtype.itemsize, ALIGNMENT) for private in self.private)


def is_float_sum(op: Atomic) -> bool:
    """True if an update adds floats."""
    return op.kind == "add" and kind_of(op.ref.ref.dtype) == "float"


def partition_tasks(func: Func) -> TaskPartition:
    """The tasks of a Func, and the copies of arrays that they update."""
    ops = list(_ops_with_counts(func.body, 1))
    refs = dict.fromkeys(op.ref for op, _ in ops if isinstance(op, Atomic) and is_float_sum(op))
    private = _private_copies(func, ops)
    if not refs:
        updates = [_updates_per_element(copy.ref, func, ops) for copy in private]
        most_tasks = min(calibration.MAX_PRIVATE_TASKS, *updates) if private else calibration.MAX_TASKS
        return TaskPartition(func.axes, _even_runs(prod(func.grid), most_tasks), private=private)
    summed = {n for ref in refs for n in sum_axes(func, ref)}
    wide = {ref: accumulator(ref.ref.dtype) for ref in refs}
    axes = _ungrouped(func.axes, summed)
    runs, digits, count = sum_runs(axes, summed, _most_partial_sums(func, summed, wide))
    if runs.count > calibration.MAX_PRIVATE_TASKS:
        private = ()
    slices = _column_slices(func, calibration.MAX_PARTIAL_SUMS // max(runs.count, 1))
    if count == 1 and all(ref.ref.dtype == dtype for ref, dtype in wide.items()):
        return TaskPartition(axes, runs, slices, in_place=tuple(refs), private=private)
    return TaskPartition(
        axes, runs, slices, digits, tuple(PartialSums(ref, count, wide[ref]) for ref in refs), private=private
    )


def partial_sums_of(func: Func) -> tuple[PartialSums, ...]:
    """The partial sums of a Func."""
    return partition_tasks(func).partial_sums


def axis_groups(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """The numbers of the axes of the grid, in order; the tiles of two axes of a group take turns."""
    groups, at = list[tuple[int, ...]](), len(axes) - 1
    while at >= 0:
        groups.append((at - 1, at) if at and axes[at - 1].group else (at,))
        at -= len(groups[-1])
    return groups[::-1]


# --- runs ------------------------------------------------------------------------------------------------------------


def _even_runs(programs: int, most: int) -> Runs:
    """All programs in at most so many runs."""
    return Runs(1, programs, max(cdiv(programs, max(min(programs, most), 1)), 1))


def _ungrouped(axes: tuple[Axis, ...], summed: Collection[int]) -> tuple[Axis, ...]:
    """The axes; no axis of sums is in a group with another axis, for then tiles of both take turns."""
    mixed = {pair[0] for pair in axis_groups(axes) if len({n in summed for n in pair}) == 2}
    return tuple(replace(axis, group=0) if n in mixed else axis for n, axis in enumerate(axes))


def sum_runs(axes: tuple[Axis, ...], summed: Collection[int], most: int) -> tuple[Runs, tuple[RunDigit, ...], int]:
    """The runs of programs that add up, the digits of a run's number that tell its partial sum, and how many there are.

    Axes of sums that follow each other count as one axis, and so do other axes. Each index of the first axes has runs
    of its own, as long as axes of sums have no more than `most` indices together. The next axis of sums is cut into
    ranges, which depend on the tiles of axes of sums alone.
    """
    lengths: list[tuple[int, bool]] = []
    for numbers in axis_groups(axes):
        tiles = prod(axes[n].tiles for n in numbers)
        is_sum = numbers[0] in summed and tiles > 1  # a single tile separates: the whole may have several, of no sum
        if lengths and lengths[-1][1] == is_sum:
            lengths[-1] = lengths[-1][0] * tiles, is_sum
        else:
            lengths.append((tiles, is_sum))
    last = max((n for n, (_, is_sum) in enumerate(lengths) if is_sum), default=-1)
    cut, indices = 0, 1
    while cut <= last and (not lengths[cut][1] or indices * lengths[cut][0] <= most):
        indices *= lengths[cut][0] if lengths[cut][1] else 1
        cut += 1
    groups, group = (prod(tiles for tiles, _ in part) for part in (lengths[:cut], lengths[cut:]))
    if cut <= last:
        tiles = lengths[cut][0]
        runs = Runs(groups, group, group // tiles * cdiv(tiles, most // indices))
    else:
        runs = replace(_even_runs(group, max(calibration.MAX_TASKS // max(groups, 1), 1)), groups=groups)
    digits, stride, below = list[RunDigit](), 1, 1
    for tiles, is_sum in reversed([*lengths[:cut], (runs.in_group, cut <= last)]):
        if is_sum and tiles > 1:
            digits.append(RunDigit(below, tiles, stride))
            stride *= tiles
        below *= tiles
    if not digits and runs.in_group == 1:
        runs = Runs(1, groups * group, group * cdiv(groups, calibration.MAX_TASKS))
    return runs, tuple(digits), stride


def _most_partial_sums(func: Func, summed: Collection[int], wide: Mapping[Value, DType]) -> int:
    """The most partial sums that pay, and that memory allows.

    Args:
      func: a legal Func.
      summed: the numbers of the axes of sums.
      wide: the dtype of the sums of each array.
    """
    own = {index for n, index in enumerate(func.body.args) if n not in summed}
    elements: dict[Block, dict[Value, int]] = {}
    runs: dict[Block, int] = {}
    for site in writes(func):
        if site.op.ref in wide:
            folds = [op for op, _ in site.path if isinstance(op, Fold)]
            followed = [fold for fold in folds if fold.body.args[0] in site.used]
            scope = followed[-1].body if followed else func.body
            indices = own | {fold.body.args[0] for fold in followed}
            elements.setdefault(scope, {})[site.op.ref] = _elements(site.op, indices)
            around = folds[: folds.index(followed[-1])] if followed else []
            runs[scope] = prod(fold.axis.tiles for fold in around if fold not in followed)
    programs = prod(func.grid[n] for n in summed)
    worthwhile = min(
        programs
        * runs[scope]
        * _float_work(scope)
        // max(calibration.MIN_WORK_PER_PARTIAL_SUM * sum(sizes.values()), 1)
        for scope, sizes in elements.items()
    )
    nbytes = sum(prod(ref.ref.shape) * dtype.itemsize for ref, dtype in wide.items())
    affordable = calibration.MAX_PARTIAL_SUM_BYTES // max(nbytes, 1)
    return max(1, min(calibration.MAX_PARTIAL_SUMS, affordable, worthwhile))


def _float_work(block: Block) -> int:
    """Elements of floats that a block computes. What masks need is left out, for only ragged tiles have them."""
    return sum(_work(op) * times for op, times in _ops_with_counts(block, 1) if _computes_floats(op))


def _computes_floats(op: Op) -> bool:
    if isinstance(op, (Select, Constant, Broadcast)):
        return False
    values = op.results or op.operands
    return any(isinstance(v.type, TileType) and kind_of(v.tile.dtype) == "float" for v in values)


def _elements(op: WriteOp, own: Set[Value]) -> int:
    """Elements of an array that programs update whose indices `own` are equal."""
    followed = [{op.positions[t.operand] for t in dim.position.terms} <= own for dim in op.access.dims]
    sizes = zip(op.access.dims, op.extents, followed, strict=True)
    return prod(dim.size if follows and dim.kind in ("block", "index") else extent for dim, extent, follows in sizes)


# --- private copies --------------------------------------------------------------------------------------------------


def _private_copies(func: Func, ops: list[tuple[Op, int]]) -> tuple[PrivateCopy, ...]:
    """The private copies that pay."""
    copies, offset = list[PrivateCopy](), 0
    for ref in dict.fromkeys(op.ref for op, _ in ops if isinstance(op, Atomic)):
        updates = [(op, times) for op, times in ops if isinstance(op, Atomic) and op.ref is ref]
        touches = sum(isinstance(op, MemoryOp) and op.ref is ref for op, _ in ops)
        one_kind = len({op.kind for op, _ in updates}) == 1 and touches == len(updates)
        if not one_kind or kind_of(ref.ref.dtype) not in ("signed", "unsigned"):
            continue
        nbytes, lanes = prod(ref.ref.shape) * ref.ref.dtype.itemsize, sum(_work(op) * times for op, times in updates)
        if (
            lanes >= calibration.MIN_PRIVATE_LANES
            and _updates_per_element(ref, func, ops) >= calibration.MIN_PRIVATE_UPDATES
            and offset + nbytes <= calibration.MAX_PRIVATE_BYTES
        ):
            copies.append(PrivateCopy(ref, updates[0][0].kind, offset))
            offset += round_up(nbytes, ALIGNMENT)
    return tuple(copies)


def _updates_per_element(ref: Value, func: Func, ops: list[tuple[Op, int]]) -> int:
    """Average number of updates of an element of an array by all programs, rounded down.

    `ops` has each op with its number of runs in one program.
    """
    lanes = sum(_work(op) * times for op, times in ops if isinstance(op, Atomic) and op.ref is ref)
    return prod(func.grid) * lanes // max(prod(ref.ref.shape), 1)


# --- what programs do ------------------------------------------------------------------------------------------------


def _ops_with_counts(block: Block, times: int) -> Iterator[tuple[Op, int]]:
    """Each op with the number of times that a program runs it. Bodies of `while` loops count once."""
    for op in block.ops:
        yield op, times
        for region in op.regions:
            yield from _ops_with_counts(region, times * op.axis.tiles if isinstance(op, Fold) else times)


def _work(op: Op) -> int:
    """Elements that an op computes. For a dot, 16 multiply-adds count as one element."""
    size = max((v.tile.size for v in (*op.operands, *op.results) if isinstance(v.type, TileType)), default=1)
    if isinstance(op, Dot):
        depth = prod(op.operands[0].tile.shape[d] for d in op.contract[0])
        size = max(size, op.result.tile.size * depth // 16)
    return size


def _column_slices(func: Func, most: int) -> int:
    """Number of slices that the columns of all updates are divided into, at most `most`."""
    widths = list[int]()
    for op in func.body.ops:
        if isinstance(op, Atomic):
            if not (is_float_sum(op) and updates_rows(op)):
                return 1
            widths.append(op.value.tile.shape[-1])
        elif op.regions or not (op.pure or is_virtual(op)) or not (is_virtual(op) or _is_scalar(op)):
            return 1
    slices = 1
    while 2 * slices <= most and all(width % (2 * slices * calibration.MIN_SLICE_COLUMNS) == 0 for width in widths):
        slices *= 2
    return slices


def _is_scalar(op: Op) -> bool:
    return not any(v.tile.shape for v in (*op.operands, *op.results) if isinstance(v.type, TileType))


def updates_rows(op: Atomic) -> bool:
    """True if neighbours along the last dim of the tile are neighbours in the array."""
    return bool(op.access.dims) and op.access.dims[-1].kind == "block" and bool(op.value.tile.shape)
