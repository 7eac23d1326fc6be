"""Each fault, planted in each op that touches memory, in each form of access and of control: found at its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.ir.funcs import FILE, Lanes, Source, access_of, at, func, gather, ref, tile, whole
from tilekern.errors import (
    InterpreterError,
    OrderDependenceError,
    OutOfBoundsError,
    UnwrittenError,
    WriteConflictError,
)
from tilekern.ir.control import Switch, While
from tilekern.ir.core import Axis, Func, Value, index_value
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Access, Atomic, Load, MemoryOp, Position, Store, Term, WriteOp
from tilekern.ir.shape import Broadcast, Iota, Reshape
from tilekern.ir.types import BOOL, F32, I32
from tilekern.ir.verify import verify

ROWS, COLUMNS, GRID = 6, 8, 5
IOTA = {"dtype": I32, "dim": 0}


@dataclass(frozen=True)
class Touch:
    """An access to some elements of one row of an array of ROWS × COLUMNS."""

    access: Access
    positions: tuple[Value, ...]
    mask: Value | None = None


def touch(lanes: tuple[Lanes, ...], mask: Value | None = None, extents: tuple[int, ...] | None = None) -> Touch:
    access, positions = access_of(lanes)
    return Touch(replace(access, extents=extents), positions, mask)


# --- forms of an access; `row` is the number of the row ---------------------------------------------------------------


def index(b: Source, row: Value) -> Touch:
    return touch((at(row), Lanes("index", (), 1, 3)))


def block(b: Source, row: Value) -> Touch:
    return touch((tile(row, 1), whole(COLUMNS)))


def ragged(b: Source, row: Value) -> Touch:
    return touch((at(row), Lanes("block", (), 5, COLUMNS - 3)))


def masked(b: Source, row: Value) -> Touch:
    lanes = b.op(Iota, shape=(COLUMNS,), **IOTA)
    return touch((at(row), whole(COLUMNS)), b.ew("ge", lanes, b.const(3, (COLUMNS,))))


def vector(b: Source, row: Value) -> Touch:
    """Columns -2, 1, 4, 7, 10."""
    step = b.ew("mul", b.op(Iota, shape=(5,), **IOTA), b.const(3, (5,)))
    return touch((at(row), gather(b.ew("sub", step, b.const(2, (5,))))))


def masked_vector(b: Source, row: Value) -> Touch:
    lanes = b.op(Iota, shape=(COLUMNS,), **IOTA)
    return touch((at(row), gather(lanes)), b.ew("lt", lanes, b.const(3, (COLUMNS,))))


def points(b: Source, row: Value) -> Touch:
    """The row and its columns as two index vectors that go together."""
    rows, columns = b.op(Broadcast, row, shape=(4,), dims=()), b.op(Iota, shape=(4,), **IOTA)
    return touch((gather(rows), Lanes("along", ((columns, 1),), 4)))


def flat(b: Source, row: Value) -> Touch:
    """The array as one vector."""
    return touch((tile(row, COLUMNS),), extents=(ROWS * COLUMNS,))


def digits(b: Source, row: Value) -> Touch:
    """The row as a digit of a number."""
    number = b.ew("mul", row, b.const(4))
    found = touch((at(number), whole(COLUMNS)))
    first = replace(found.access.dims[0], position=Position((Term(0, 1, 4),)))
    return replace(found, access=replace(found.access, dims=(first, *found.access.dims[1:])))


FORMS = (index, block, ragged, masked, vector, masked_vector, points, flat, digits)


# --- ops --------------------------------------------------------------------------------------------------------------


def load(b: Source, array: Value, where: Touch) -> int:
    return _add(b, Load, array, where)


def filled(b: Source, array: Value, where: Touch) -> int:
    return _add(b, Load, array, where, filled=True)


def store(b: Source, array: Value, where: Touch) -> int:
    return _add(b, Store, array, where)


def add(b: Source, array: Value, where: Touch) -> int:
    return _add(b, Atomic, array, where, kind="add")


def maximum(b: Source, array: Value, where: Touch) -> int:
    return _add(b, Atomic, array, where, kind="max")


def _add(b: Source, op: Any, array: Value, where: Touch, **fields: Any) -> int:
    """Add the op; returns its line."""
    dtype = array.ref.dtype
    value = () if op is Load else (b.const(1, where.access.shape, dtype),)
    mask = () if where.mask is None else (where.mask,)
    fill = (b.const(7, (), dtype),) if fields.get("filled") else ()
    operands = (array, *value, *where.positions, *mask, *fill)
    b.add(op(operands=operands, access=where.access, masked=where.mask is not None, loc=b.loc(), **fields))
    return b.count


LOADS, WRITES = (load, filled), (store, add, maximum)


# --- places of an op: `plant()` adds it ------------------------------------------------------------------------------


def straight(b: Source, plant: Callable[[], Any]) -> None:
    plant()


def in_a_fold(b: Source, plant: Callable[[], Any]) -> None:
    b.fold(Axis("k", 6, 3), b.const(0), b.const(6), (), lambda _: (plant(), ())[1])


def in_a_branch(b: Source, plant: Callable[[], Any]) -> None:
    regions = (b.block((), lambda: ()), b.block((), lambda: (plant(), ())[1]))
    b.add(Switch(operands=(b.const(1),), regions=regions, loc=b.loc()))


def in_a_while(b: Source, plant: Callable[[], Any]) -> None:
    def step(n: Value) -> tuple[Value, ...]:
        plant()
        return (b.ew("add", n, b.const(1)),)

    args = [(index_value("n"),) for _ in range(2)]
    condition = b.block(args[0], lambda n: (b.ew("lt", n, b.const(2)),))
    b.add(While(operands=(b.const(0),), regions=(condition, b.block(args[1], step)), loc=b.loc()))


PLACES = (straight, in_a_fold, in_a_branch, in_a_while)


# --- faults: each builds a program and returns the line that is to blame ---------------------------------------------


@dataclass(frozen=True)
class Case:
    """A body of a kernel of GRID programs over one output; `fault` plants an op in the place of the case."""

    b: Source
    out: Value
    i: Value
    form: Callable[[Source, Value], Touch]
    place: Callable[[Source, Callable[[], Any]], None]

    def fault(self, op: Callable[..., int], row: Value) -> int:
        lines: list[int] = []
        self.place(self.b, lambda: lines.append(op(self.b, self.out, self.form(self.b, row))))
        return lines[0]

    def whole(self, op: Callable[..., int], row: Value) -> int:
        """The same for a whole row, outside of all control."""
        return op(self.b, self.out, block(self.b, row))

    def next(self) -> Value:
        return self.b.ew("add", self.i, self.b.const(1))


def two_programs_store(case: Case, op: Any) -> int:
    return case.fault(store, case.b.const(0))


def one_program_stores_what_another_stored(case: Case, op: Any) -> int:
    case.whole(store, case.i)
    return case.fault(store, case.b.ew("sub", case.i, case.b.const(1)))


def updates_after_a_store(case: Case, op: Any) -> int:
    case.whole(store, case.i)
    return case.fault(op, case.i)


def a_store_after_updates(case: Case, op: Any) -> int:
    case.whole(op, case.i)
    return case.fault(store, case.i)


def loads_what_is_stored_later(case: Case, op: Any) -> int:
    line = case.fault(op, case.next())
    case.whole(store, case.i)
    return line


def loads_what_was_stored_before(case: Case, op: Any) -> int:
    case.whole(store, case.i)
    return case.fault(op, case.b.ew("sub", case.i, case.b.const(1)))


def loads_what_is_updated(case: Case, op: Any) -> int:
    case.whole(add, case.i)
    return case.fault(op, case.i)


def updates_what_was_loaded(case: Case, op: Any) -> int:
    case.whole(load, case.i)
    return case.fault(op, case.i)


def updates_of_two_kinds(case: Case, op: Any) -> int:
    case.whole(maximum if op is add else add, case.i)
    return case.fault(op, case.i)


def loads_before_a_store(case: Case, op: Any) -> int:
    line = case.fault(op, case.i)
    case.whole(store, case.i)
    return line


def loads_what_nobody_stores(case: Case, op: Any) -> int:
    case.whole(store, case.i)
    return case.fault(op, case.b.const(ROWS - 1))


def leaves_elements_out(case: Case, op: Any) -> int:
    case.fault(store, case.i)
    return 1000  # of the kernel: there is no access to blame


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Case, Any], int]
    error: type[InterpreterError]
    role: str
    ops: tuple[Callable[..., int], ...] = (store,)


FAULTS = (
    Fault(two_programs_store, WriteConflictError, "out"),
    Fault(one_program_stores_what_another_stored, WriteConflictError, "zeros"),
    Fault(updates_after_a_store, WriteConflictError, "zeros", (add, maximum)),
    Fault(a_store_after_updates, WriteConflictError, "zeros", (add, maximum)),
    Fault(loads_what_is_stored_later, OrderDependenceError, "zeros", LOADS),
    Fault(loads_what_was_stored_before, OrderDependenceError, "out", LOADS),
    Fault(loads_what_is_updated, OrderDependenceError, "zeros", LOADS),
    Fault(updates_what_was_loaded, OrderDependenceError, "zeros", (add, maximum)),
    Fault(updates_of_two_kinds, OrderDependenceError, "zeros", (add, maximum)),
    Fault(loads_before_a_store, UnwrittenError, "out", LOADS),
    Fault(loads_what_nobody_stores, UnwrittenError, "out", LOADS),
    Fault(leaves_elements_out, UnwrittenError, "out"),
)


def assert_found(error: type[InterpreterError], kernel: Func, line: int, *arrays: Any) -> None:
    verify(kernel)
    with pytest.raises(InterpreterError) as caught:
        interpret(kernel, *arrays)
    assert type(caught.value) is error, caught.value
    assert (caught.value.loc.file, caught.value.loc.line) == (FILE, line), caught.value
    assert caught.value.expected and caught.value.fix, caught.value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_fault_is_found_at_its_line(fault: Fault, form: Any, place: Any) -> None:
    for op, dtype in product(fault.ops, (F32, I32)):
        out, lines = ref("out", (ROWS, COLUMNS), fault.role, dtype), []
        kernel = func(
            "f",
            (out,),
            (Axis("i", GRID),),
            lambda b, i: lines.append(fault.plant(Case(b, out, i, form, place), op)),  # noqa: B023 -- it runs at once
        )
        assert_found(fault.error, kernel, lines[0])


# --- dims that are proved in bounds, and are not ----------------------------------------------------------------------


def proved(where: Touch, number: int) -> Touch:
    dims = where.access.dims
    return replace(where, access=where.access.marked([dim.in_bounds or n == number for n, dim in enumerate(dims)]))


# For each form the row and the number of the dim that leaves the array.
OUTSIDE = [(form, row, 0) for form in FORMS for row in (ROWS, -1)] + [(ragged, 0, 1), (vector, 0, 1)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", (*LOADS, *WRITES))
@pytest.mark.parametrize(("form", "row", "dim"), OUTSIDE)
def test_a_wrong_proof_is_found_at_its_line(op: Any, form: Any, row: int, dim: int, place: Any) -> None:
    out, lines = ref("out", (ROWS, COLUMNS), "zeros"), []

    def body(b: Source, i: Value) -> None:
        place(b, lambda: lines.append(op(b, out, proved(form(b, b.const(row)), dim))))

    assert_found(OutOfBoundsError, func("f", (out,), (Axis("i", GRID),), body), lines[0])


# --- lanes of a tail as indices of a write: the tile of 4 reaches behind the 6 elements -------------------------------


def rows(b: Source, where: Value) -> Touch:
    return touch((gather(where), whole(COLUMNS)))


def computed_rows(b: Source, where: Value) -> Touch:
    return rows(b, b.ew("add", b.ew("mul", where, b.const(2, (4,))), b.const(1, (4,))))


def reshaped_rows(b: Source, where: Value) -> Touch:
    return rows(b, b.op(Reshape, b.op(Reshape, where, shape=(2, 2)), shape=(4,)))


def rows_of_a_loop(b: Source, where: Value) -> Touch:
    (found,) = b.fold(
        Axis("k", 2, 1), b.const(0), b.const(2), (b.const(0, (4,)),), lambda _, c: (b.ew("max", where, c),)
    )
    return rows(b, found)


def rows_of_a_branch(b: Source, where: Value) -> Touch:
    regions = (b.block((), lambda: (where,)), b.block((), lambda: (b.const(3, (4,)),)))
    return rows(b, b.op(Switch, b.const(0), regions=regions))


def shifted_rows(b: Source, where: Value) -> Touch:
    return touch((Lanes("gather", ((where, 1),), 4, 2), whole(COLUMNS)))


def columns(b: Source, where: Value) -> Touch:
    return touch((at(b.const(2)), gather(where)))


def masked_rows(b: Source, where: Value) -> Touch:
    return touch((gather(where), whole(COLUMNS)), b.const(True, (4, COLUMNS), BOOL))


def first_of_points(b: Source, where: Value) -> Touch:
    return touch((gather(where), Lanes("along", ((b.op(Iota, shape=(4,), **IOTA), 1),), 4)))


def second_of_points(b: Source, where: Value) -> Touch:
    return touch((gather(b.op(Iota, shape=(4,), **IOTA)), Lanes("along", ((where, 1),), 4)))


def flat_points(b: Source, where: Value) -> Touch:
    return touch((gather(where),), extents=(ROWS * COLUMNS,))


def digits_of_rows(b: Source, where: Value) -> Touch:
    found = rows(b, where)
    first = replace(found.access.dims[0], position=Position((Term(0, 1, 2),)))
    return replace(found, access=replace(found.access, dims=(first, *found.access.dims[1:])))


VECTORS = (
    *(rows, computed_rows, reshaped_rows, rows_of_a_loop, rows_of_a_branch, shifted_rows, columns, masked_rows),
    *(first_of_points, second_of_points, flat_points, digits_of_rows),
)
INDICES = np.arange(6, dtype=np.int32)[::-1].copy()


def scatter(op: Any, form: Any, place: Any, read: Callable[[Source, Value, Value], Value]) -> tuple[Func, int]:
    """A kernel that writes one row of its output for each of the numbers that `read` loads."""
    where, out = ref("where", (6,), dtype=I32), ref("out", (ROWS, COLUMNS), "zeros")
    lines: list[int] = []

    def body(b: Source, i: Value) -> None:
        # One program only, so that no race is found first.
        vector = read(b, where, b.ew("add", i, b.const(1)))
        place(b, lambda: lines.append(op(b, out, form(b, vector))))

    return func("f", (where, out), (Axis("i", 1),), body), lines[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("form", VECTORS)
def test_lanes_of_a_tail_are_no_indices(op: Any, form: Any, place: Any) -> None:
    kernel, line = scatter(op, form, place, lambda b, where, i: b.load(where, tile(i, 4)))
    assert_found(OutOfBoundsError, kernel, line, INDICES)


def guarded(b: Source, where: Value, i: Value) -> Value:
    return b.load(where, tile(i, 4), fill=b.const(-99))


@pytest.mark.parametrize("form", VECTORS)
def test_what_a_kernel_fills_in_is_an_index(form: Any) -> None:
    kernel, _ = scatter(store, form, straight, guarded)
    verify(kernel)
    interpret(kernel, INDICES)


def test_a_masked_lane_of_a_tail_writes_nothing() -> None:
    def masked(b: Source, where: Value) -> Touch:
        lanes = b.op(Iota, shape=(4, COLUMNS), dtype=I32, dim=0)
        return touch((gather(where), whole(COLUMNS)), b.ew("lt", lanes, b.const(2, (4, COLUMNS))))

    kernel, _ = scatter(store, masked, straight, lambda b, where, i: b.load(where, tile(i, 4)))
    (out,) = interpret(kernel, INDICES)
    np.testing.assert_array_equal(out[:, 0], [1, 1, 0, 0, 0, 0])


def test_the_table_has_every_op_that_touches_memory() -> None:
    assert {MemoryOp, *MemoryOp.__subclasses__(), *WriteOp.__subclasses__()} == {MemoryOp, WriteOp, Load, Store, Atomic}
