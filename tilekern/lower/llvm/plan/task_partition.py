"""Copies of the arrays that programs update: how many there are, and which tasks they are of.

Sums of floats depend on the order of additions. A *share* is a copy that some tasks add to, in the order of their
programs; shares are added up behind the call. A single one is the array itself, if it needs no wider dtype.

The outcome of integer updates does not depend on their order. An *own* copy lies in the scratch memory of a thread; at
its end a task combines it with the array, one task at a time. That is cheaper than atomic instructions for arrays that
are small beside the number of updates.

Tasks that only add tiles to rows may each do a *slice* of the columns, for elements of different columns never meet.
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
from tilekern.lower.llvm.element_index import is_virtual

# The most tasks that share a sum, and the bytes of their shares.
_SHARES, _BYTES = 16, 64 << 20
# For each element of a share, programs compute at least so many.
_WORK = 32
# The most tasks with own copies; the bytes of these, which stay in the second-level cache; the updates of each element,
# from which on they pay; the lanes that a program updates at least: programs that do other things need many tasks.
_OWN, _OWN_BYTES, _OFTEN, _LANES = 32, 1 << 20, 8, 16
ALIGNMENT = 64
"""The bytes to a multiple of which own copies are aligned."""

# The least columns of a slice: whole lines of the cache.
_COLUMNS = 32


@dataclass(frozen=True)
class PartialSums:
    """The shares of an array that floats are added to: [count, *shape] of `dtype`."""

    ref: Value
    count: int
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all shares together."""
        return (self.count, *self.ref.ref.shape)


@dataclass(frozen=True)
class PrivateCopy:
    """An array of integers that threads have own copies of.

    Attributes:
      ref: the array.
      kind: of all its updates.
      offset: of the copy, in bytes, behind the other scratch memory.
    """

    ref: Value
    kind: AtomicKind
    offset: int

    @property
    def size(self) -> int:
        """The elements."""
        return prod(self.ref.ref.shape)


@dataclass(frozen=True)
class TaskPartition:
    """The division of the programs of a Func into tasks.

    Attributes:
      parts: the most parts that the programs are divided into; None if nothing limits them. A part has its shares.
      slices: the tasks of a part, of which each does some columns.
      shares: the arrays that have shares, as many each; none where the only part adds to the arrays themselves.
      plain: the arrays of floats that the only part adds to.
      own: the arrays that threads have copies of.
    """

    parts: int | None = None
    slices: int = 1
    partial_sums: tuple[PartialSums, ...] = ()
    in_place: tuple[Value, ...] = ()
    private: tuple[PrivateCopy, ...] = ()

    @property
    def private_bytes(self) -> int:
        """The scratch memory of the own copies."""
        return sum(round_up(private.size * private.ref.ref.dtype.itemsize, ALIGNMENT) for private in self.private)


def is_float_sum(op: Atomic) -> bool:
    """True if an update is a sum of floats."""
    return op.kind == "add" and kind_of(op.ref.ref.dtype) == "float"


def partition_tasks(func: Func) -> TaskPartition:
    """The division of a Func."""
    programs, ops = prod(func.grid), list(_ops_with_counts(func.body, 1))
    refs = dict.fromkeys(op.ref for op, _ in ops if isinstance(op, Atomic) and is_float_sum(op))
    private = _private_copies(func, ops)
    if not refs:
        return TaskPartition(
            min(_OWN, *(_updates_per_element(o.ref, func, ops) for o in private)) if private else None, private=private
        )
    wide = {ref: accumulator(ref.ref.dtype) for ref in refs}
    nbytes = sum(prod(ref.ref.shape) * wide[ref].itemsize for ref in refs)
    elements = sum(prod(ref.ref.shape) for ref in refs)
    work = programs * sum(_work(op) * times for op, times in ops)
    count = max(1, min(_SHARES, programs, _BYTES // max(nbytes, 1), work // max(_WORK * elements, 1)))
    slices = _column_slices(func, _SHARES // count)
    if count == 1 and all(ref.ref.dtype == dtype for ref, dtype in wide.items()):
        return TaskPartition(1, slices, in_place=tuple(refs), private=private)
    return TaskPartition(count, slices, tuple(PartialSums(ref, count, wide[ref]) for ref in refs), private=private)


def partial_sums_of(func: Func) -> tuple[PartialSums, ...]:
    """The shares that a Func needs."""
    return partition_tasks(func).partial_sums


# --- own copies ------------------------------------------------------------------------------------------------------


def _private_copies(func: Func, ops: list[tuple[Op, int]]) -> tuple[PrivateCopy, ...]:
    """The arrays of which own copies pay."""
    found, offset = list[PrivateCopy](), 0
    for ref in dict.fromkeys(op.ref for op, _ in ops if isinstance(op, Atomic)):
        updates = [(op, times) for op, times in ops if isinstance(op, Atomic) and op.ref is ref]
        touches = sum(isinstance(op, MemoryOp) and op.ref is ref for op, _ in ops)
        one_kind = len({op.kind for op, _ in updates}) == 1 and touches == len(updates)
        if not one_kind or kind_of(ref.ref.dtype) not in ("signed", "unsigned"):
            continue
        nbytes, lanes = prod(ref.ref.shape) * ref.ref.dtype.itemsize, sum(_work(op) * times for op, times in updates)
        if lanes >= _LANES and _updates_per_element(ref, func, ops) >= _OFTEN and offset + nbytes <= _OWN_BYTES:
            found.append(PrivateCopy(ref, updates[0][0].kind, offset))
            offset += round_up(nbytes, ALIGNMENT)
    return tuple(found)


def _updates_per_element(ref: Value, func: Func, ops: list[tuple[Op, int]]) -> int:
    """The number of updates of an element of an array, on average."""
    lanes = sum(_work(op) * times for op, times in ops if isinstance(op, Atomic) and op.ref is ref)
    return prod(func.grid) * lanes // max(prod(ref.ref.shape), 1)


# --- what programs do ------------------------------------------------------------------------------------------------


def _ops_with_counts(block: Block, times: int) -> Iterator[tuple[Op, int]]:
    """All ops, and how often a program runs them; of loops without known ends once."""
    for op in block.ops:
        yield op, times
        for region in op.regions:
            yield from _ops_with_counts(region, times * op.axis.tiles if isinstance(op, Fold) else times)


def _work(op: Op) -> int:
    """The elements that an op computes; a vector of multiply-adds counts as one."""
    size = max((v.tile.size for v in (*op.operands, *op.results) if isinstance(v.type, TileType)), default=1)
    if isinstance(op, Dot):
        depth = prod(op.operands[0].tile.shape[d] for d in op.contract[0])
        size = max(size, op.result.tile.size * depth // 16)
    return size


def _column_slices(func: Func, most: int) -> int:
    """Into how many slices the columns of all updates are cut."""
    widths = list[int]()
    for op in func.body.ops:
        if isinstance(op, Atomic):
            if not (is_float_sum(op) and updates_rows(op)):
                return 1
            widths.append(op.value.tile.shape[-1])
        elif op.regions or not (op.pure or is_virtual(op)) or not (is_virtual(op) or _is_scalar(op)):
            return 1
    slices = 1
    while 2 * slices <= most and all(width % (2 * slices * _COLUMNS) == 0 for width in widths):
        slices *= 2
    return slices


def _is_scalar(op: Op) -> bool:
    return not any(v.tile.shape for v in (*op.operands, *op.results) if isinstance(v.type, TileType))


def updates_rows(op: Atomic) -> bool:
    """True if neighbours along the last dim of the tile are neighbours in the array."""
    return bool(op.access.dims) and op.access.dims[-1].kind == "block" and bool(op.value.tile.shape)
