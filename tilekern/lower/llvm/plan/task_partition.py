"""Partition of the grid into tasks, and the copies of arrays that tasks update.

Sums of floats depend on the order of the additions. *Partial sums* are copies of the array: each belongs to a
contiguous part of the programs, which add to it in order. XLA adds the partial sums up after the call. If there is one
part, its programs add to the array itself, unless the sums need a wider dtype.

Updates of integers give the same result in any order. A *private copy* lies in the scratch memory of a thread. At its
end, a task merges the copy with the array, one task at a time. If elements are updated often, this is cheaper than
atomic instructions.

If programs only add tiles to rows, the tasks of a part may each process a *slice* of the columns: elements of different
columns are never added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Func, Op, Value, round_up
from tilekern.ir.memory import Atomic, AtomicKind, MemoryOp
from tilekern.ir.types import DType, TileType, accumulator, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import is_virtual

ALIGNMENT = 64
"""Alignment of private copies, in bytes."""


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of an array that floats are added to: [count, *shape] of `dtype`."""

    ref: Value
    count: int
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all partial sums together."""
        return (self.count, *self.ref.ref.shape)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class TaskPartition:
    """The division of the programs of a Func into tasks.

    Attributes:
      max_parts: the most parts that the programs are divided into; None without a limit.
      slices: the tasks of a part; each processes a slice of the columns.
      partial_sums: the partial sums of each array that has some, one for each part.
      in_place: the arrays of floats that the programs of the only part add to.
      private: the private copies.
    """

    max_parts: int | None = None
    slices: int = 1
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
    programs, ops = prod(func.grid), list(_ops_with_counts(func.body, 1))
    refs = dict.fromkeys(op.ref for op, _ in ops if isinstance(op, Atomic) and is_float_sum(op))
    private = _private_copies(func, ops)
    if not refs:
        updates = [_updates_per_element(copy.ref, func, ops) for copy in private]
        return TaskPartition(min(calibration.MAX_PRIVATE_TASKS, *updates) if private else None, private=private)
    wide = {ref: accumulator(ref.ref.dtype) for ref in refs}
    nbytes = sum(prod(ref.ref.shape) * wide[ref].itemsize for ref in refs)
    elements = sum(prod(ref.ref.shape) for ref in refs)
    work = programs * sum(_work(op) * times for op, times in ops)
    affordable = calibration.MAX_PARTIAL_SUM_BYTES // max(nbytes, 1)
    worthwhile = work // max(calibration.MIN_WORK_PER_PARTIAL_SUM * elements, 1)
    count = max(1, min(calibration.MAX_PARTIAL_SUMS, programs, affordable, worthwhile))
    slices = _column_slices(func, calibration.MAX_PARTIAL_SUMS // count)
    if count == 1 and all(ref.ref.dtype == dtype for ref, dtype in wide.items()):
        return TaskPartition(1, slices, in_place=tuple(refs), private=private)
    return TaskPartition(count, slices, tuple(PartialSums(ref, count, wide[ref]) for ref in refs), private=private)


def partial_sums_of(func: Func) -> tuple[PartialSums, ...]:
    """The partial sums of a Func."""
    return partition_tasks(func).partial_sums


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
