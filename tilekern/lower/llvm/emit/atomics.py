"""Atomic updates of arrays, of the copies that `shares` plans, and what becomes of the own copies of threads."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tilekern.ir.compute import identity, on_bools
from tilekern.ir.memory import Atomic
from tilekern.ir.types import F32, F64, DType, accumulator, is_float8, kind_of
from tilekern.lower.llvm.element_index import Index, Place
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute, convert
from tilekern.lower.llvm.emit.loop_nests import over, pieces
from tilekern.lower.llvm.ir_builder import I1, I32, Code, Reg, Type, constant
from tilekern.lower.llvm.llvm_types import computed, known, packed, stored
from tilekern.lower.llvm.plan.private_copies import Own, in_rows
from tilekern.lower.llvm.runtime.fp_mode import pause


@dataclass(frozen=True)
class Copy:
    """The place in which this task updates an array, by loads and stores.

    Attributes:
      base: the address.
      dtype: of its elements.
      slices: into how many slices the columns are cut, and the number of this task's; None if there is but one.
    """

    base: Reg
    dtype: DType
    slices: int = 1
    slice: Reg | None = None


def emit(e: Elements, op: Atomic, copy: Copy | None) -> None:
    """Emit an update of a copy, or of the array itself by atomic instructions, element after element."""
    if copy is not None and in_rows(op) and not is_float8(op.ref.ref.dtype):
        over(e, op.value.tile.shape[:-1], lambda row: _row(e, op, copy, row))
        return

    def element(place: Place) -> None:
        with e.scope():
            if copy is not None:
                _update_copy(e, op, copy, place, 0)
                return
            x = e.at(op.value, place)
            address, where = e.access_address(op, place, op.mask)
            _if(e.code, where, lambda: _update(e.code, op, x, address))

    over(e, op.value.tile.shape, element)


# --- copies ----------------------------------------------------------------------------------------------------------


def _row(e: Elements, op: Atomic, copy: Copy, row: Place) -> None:
    """Update one row, or this task's slice of it: neighbours by vectors."""
    code, lanes = e.code, e.code.module.machine.lanes
    width = op.value.tile.shape[-1] // copy.slices
    first = Index() if copy.slice is None else index_of(copy.slice).times(width)
    _positions(e, op, row)

    def vector(i: Reg) -> None:
        with e.scope():
            _update_copy(e, op, copy, (*row, first.plus(index_of(i, 1))), lanes)

    code.loop(0, width // lanes * lanes, lanes, vector)
    for at, narrow in pieces(width, lanes):
        with e.scope():
            _update_copy(e, op, copy, (*row, first.plus(Index((), at, 1 if narrow else 0))), narrow)


def _positions(e: Elements, op: Atomic, row: Place) -> None:
    """Load now what says where a row lies: loads behind a store would be made again for each vector."""
    lanes = iter(row)
    for dim in op.access.dims[:-1]:
        if dim.kind == "index":
            continue
        index = next(lanes)
        vectors = (op.positions[term.operand] for term in dim.position.terms)
        for vector in (v for v in vectors if v.tile.shape):
            e.at(vector, (index,))


def _update_copy(e: Elements, op: Atomic, copy: Copy, place: Place, lanes: int) -> None:
    """Update an element, or a vector of neighbours."""
    code, dtype = e.code, op.ref.ref.dtype
    address, where = e.access_address(op, place, op.mask, copy.base, copy.dtype, lanes)
    type = stored(copy.dtype, lanes)

    def update() -> None:
        with e.scope():
            x = e.at(op.value, place, lanes)
            x = _widened(code, x, dtype) if kind_of(dtype) == "float" else x
            if where is None or not where.type.lanes:
                code.store(compute(code, op.kind, copy.dtype, code.load(type, address), x), address)
                return
            before = code.masked_load(type, address, where, constant(0, type))
            code.masked_store(compute(code, op.kind, copy.dtype, before, x), address, e.unknown(where, x))

    _if(code, where if where is not None and not where.type.lanes else None, update)


def begin(code: Code, own: Own, base: Reg) -> None:
    """Fill an own copy with what changes nothing."""
    dtype = own.ref.ref.dtype
    number = identity(own.kind, dtype)

    def fill(at: Reg, lanes: int) -> None:
        code.store(known(number, dtype, lanes), code.at(base, at, stored(dtype).scalar))

    _along(code, own, fill)


def end(code: Code, copies: list[tuple[Own, Reg, Reg]]) -> None:
    """Combine own copies with the arrays: each with the copy's and the array's address. No other task does so now."""
    with _alone(code):
        for own, copy, array in copies:

            def merge(at: Reg, lanes: int, own: Own = own, copy: Reg = copy, array: Reg = array) -> None:
                dtype = own.ref.ref.dtype
                here, there = (code.at(base, at, stored(dtype).scalar) for base in (copy, array))
                x, y = (code.load(stored(dtype, lanes), address) for address in (there, here))
                code.store(compute(code, own.kind, dtype, x, y), there)

            _along(code, own, merge)


def _along(code: Code, own: Own, body: Callable[[Reg, int], None]) -> None:
    """`body(place, lanes)` for all elements."""
    lanes = code.module.machine.vector_bytes // own.ref.ref.dtype.itemsize
    whole = own.size // lanes * lanes
    for begin, end, width in ((0, whole, lanes), (whole, own.size, 0)):

        def piece(at: Reg, width: int = width) -> None:
            body(at, width)

        code.loop(begin, end, width or 1, piece)


@contextmanager
def _alone(code: Code) -> Generator[None]:
    """The code that is emitted inside runs in one thread at a time."""
    lock = code.module.variable("lock", I32)
    code.module.declare("sched_yield", I32, [], "nounwind")
    look, again, entered = (code.fresh(name) for name in ("look", "again", "entered"))
    code.branch(look)
    code.label(look)
    before = code.emit(I32, f"atomicrmw xchg {lock}, i32 1 acquire")
    code.branch_if(code.compare("icmp eq", before, 0), entered, again)
    code.label(again)
    pause(code)
    code.call("sched_yield", I32)
    code.branch(look)
    code.label(entered)
    yield
    code.do(f"store atomic i32 0, {lock} release, align 4")


# --- elements --------------------------------------------------------------------------------------------------------


def _widened(code: Code, x: Reg, dtype: DType) -> Reg:
    """A float in the dtype in which it is added up; one of 8 bits by a table."""
    if not is_float8(dtype):
        return convert(code, x, dtype, accumulator(dtype))
    table = code.module.data("floats", np.arange(256, dtype=np.uint8).view(dtype).astype(F32))
    return code.load(Type("float"), code.at(table, code.cast("zext", x, "i64"), "float"))


def _if(code: Code, condition: Reg | None, action: Callable[[], None]) -> None:
    if condition is None:
        action()
        return
    with code.when(condition):
        action()


# --- atomic instructions ----------------------------------------------------------------------------------------------


def _update(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    dtype = op.ref.ref.dtype
    kind = kind_of(dtype)
    if kind == "float":
        _exchange(code, op, x, address)
        return
    name: str = op.kind
    if kind == "bool":
        name = on_bools(name)
    elif kind == "unsigned" and name in ("max", "min"):
        name = f"u{name}"
    code.do(f"{code.fresh_value()} = atomicrmw {name} ptr {address.text}, {packed(code, x, dtype)} monotonic")


def _exchange(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    """Exchange the element for the extreme of both until nobody else has changed it meanwhile."""
    dtype = op.ref.ref.dtype
    type, scalar = stored(dtype).integer, computed(dtype).scalar
    before = code.emit(type, f"load atomic {type}, {address} monotonic, align {type.bits // 8}")
    start = code.here
    again, done = code.fresh("again"), code.fresh("done")
    seen, found = Reg(code.fresh_value(), type), code.fresh_value()
    code.branch(again)
    code.label(again)
    code.do(f"{seen.text} = phi {type} [{before.text}, %{start}], [{found}, %{again}]")
    now = code.cast("bitcast", seen, scalar)
    old, new = (now, x) if dtype in (F32, F64) else (_widened(code, now, dtype), _widened(code, x, dtype))
    better = code.compare("fcmp ogt" if op.kind == "max" else "fcmp olt", new, old)
    better = code.binary("or", better, code.compare("fcmp uno", new, new))  # NaN wins, the first one stays
    takes = code.binary("and", better, code.compare("fcmp ord", old, old))
    wanted = code.cast("bitcast", code.select(takes, x, now), type.scalar)
    pair, won = code.fresh_value(), Reg(code.fresh_value(), I1)
    code.do(f"{pair} = cmpxchg ptr {address.text}, {seen}, {wanted} monotonic monotonic")
    code.do(f"{found} = extractvalue {{ {type}, i1 }} {pair}, 0")
    code.do(f"{won.text} = extractvalue {{ {type}, i1 }} {pair}, 1")
    code.branch_if(won, done, again)
    code.label(done)
