"""Updates of arrays: by atomic instructions, in partial sums, or in private copies, which tasks fill and merge."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from tilekern.ir.compute import identity, on_bools
from tilekern.ir.memory import Atomic
from tilekern.ir.records import record
from tilekern.ir.types import F32, F64, DType, accumulator, is_float8, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index
from tilekern.lower.llvm.element_types import element_constant, memory_type, register_type, to_memory
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute, convert
from tilekern.lower.llvm.emit.loop_nests import loop_over, tail_pieces
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I1, I32, Reg, Type, constant
from tilekern.lower.llvm.plan.task_partition import PrivateCopy, updates_rows
from tilekern.lower.llvm.runtime.fp_mode import pause


@record
class UpdateTarget:
    """Memory that only this task updates, so loads and stores do: a partial sum, a private copy, or the array itself.

    Attributes:
      base: its address.
      dtype: the dtype of its elements.
      slices: the number of slices that the columns are divided into.
      slice: the number of this task's slice; None if there is one slice.
    """

    base: Reg
    dtype: DType
    slices: int = 1
    slice: Reg | None = None


def emit(e: Elements, op: Atomic, target: UpdateTarget | None) -> None:
    """Emit an update of `target`, or of the array by atomic instructions if `target` is None."""
    if target is not None and updates_rows(op) and not is_float8(op.ref.ref.dtype):
        loop_over(e, op.value.tile.shape[:-1], lambda row: _row(e, op, target, row))
        return

    def element(coords: Coords) -> None:
        with e.scope():
            if target is not None:
                _update_target(e, op, target, coords, 0)
                return
            x = e.element(op.value, coords)
            address, where = e.access_address(op, coords, op.mask)
            _guarded(e.code, where, lambda: _atomic_update(e.code, op, x, address))

    loop_over(e, op.value.tile.shape, element)


# --- targets ---------------------------------------------------------------------------------------------------------


def _row(e: Elements, op: Atomic, target: UpdateTarget, row: Coords) -> None:
    """Update one row, or this task's slice of it, by vectors."""
    code, lanes = e.code, e.code.module.machine.lanes
    width = op.value.tile.shape[-1] // target.slices
    first = Index() if target.slice is None else index_of(target.slice).times(width)
    _load_positions(e, op, row)
    if target.slice is not None and row:
        ahead = row[-1].shifted(calibration.PREFETCHED_ROWS)
        e.prefetch_vectors(op.value, (*row[:-1], ahead, first), width)

    def vector(i: Reg) -> None:
        with e.scope():
            _update_target(e, op, target, (*row, first.plus(index_of(i, 1))), lanes)

    code.loop(0, width // lanes * lanes, lanes, vector)
    for at, narrow in tail_pieces(width, lanes):
        with e.scope():
            _update_target(e, op, target, (*row, first.plus(Index((), at, 1 if narrow else 0))), narrow)


def _load_positions(e: Elements, op: Atomic, row: Coords) -> None:
    """Load the positions of a row. LLVM cannot move loads out of the loop, which stores."""
    lanes = iter(row)
    for dim in op.access.dims[:-1]:
        if dim.kind == "index":
            continue
        index = next(lanes)
        vectors = (op.positions[term.operand] for term in dim.position.terms)
        for vector in (v for v in vectors if v.tile.shape):
            e.element(vector, (index,))


def _update_target(e: Elements, op: Atomic, target: UpdateTarget, coords: Coords, lanes: int) -> None:
    """Update one element if `lanes` is 0, else a vector of neighbours."""
    code, dtype = e.code, op.ref.ref.dtype
    address, where = e.access_address(op, coords, op.mask, target.base, target.dtype, lanes)
    type = memory_type(target.dtype, lanes)

    def update() -> None:
        with e.scope():
            x = e.element(op.value, coords, lanes)
            x = _to_accumulator(code, x, dtype) if kind_of(dtype) == "float" else x
            if where is None or not where.type.lanes:
                code.store(compute(code, op.kind, target.dtype, code.load(type, address), x), address)
                return
            before = code.masked_load(type, address, where, constant(0, type))
            code.masked_store(compute(code, op.kind, target.dtype, before, x), address, where)

    _guarded(code, where if where is not None and not where.type.lanes else None, update)


def fill_private_copy(code: Code, private: PrivateCopy, base: Reg) -> None:
    """Fill a private copy with the identity of its updates."""
    dtype = private.ref.ref.dtype
    number = identity(private.kind, dtype)

    def fill(at: Reg, lanes: int) -> None:
        code.store(element_constant(number, dtype, lanes), code.gep(base, at, memory_type(dtype).scalar))

    _for_each_vector(code, private, fill)


def merge_private_copies(code: Code, copies: list[tuple[PrivateCopy, Reg, Reg]]) -> None:
    """Merge private copies into the arrays, under a lock.

    Args:
      code: where to emit.
      copies: each with the addresses of the copy and of the array.
    """
    with _locked(code):
        for private, target, array in copies:

            def merge(
                at: Reg, lanes: int, private: PrivateCopy = private, target: Reg = target, array: Reg = array
            ) -> None:
                dtype = private.ref.ref.dtype
                here, there = (code.gep(base, at, memory_type(dtype).scalar) for base in (target, array))
                x, y = (code.load(memory_type(dtype, lanes), address) for address in (there, here))
                code.store(compute(code, private.kind, dtype, x, y), there)

            _for_each_vector(code, private, merge)


def _for_each_vector(code: Code, private: PrivateCopy, body: Callable[[Reg, int], None]) -> None:
    """Emit `body(index, lanes)` for all elements; `lanes` is 0 for elements after the last whole vector."""
    lanes = code.module.machine.vector_bytes // private.ref.ref.dtype.itemsize
    whole = private.size // lanes * lanes
    for begin, end, width in ((0, whole, lanes), (whole, private.size, 0)):

        def piece(at: Reg, width: int = width) -> None:
            body(at, width)

        code.loop(begin, end, width or 1, piece)


@contextmanager
def _locked(code: Code) -> Generator[None]:
    """Code that is emitted inside runs in one thread at a time."""
    lock = code.module.variable("lock", I32)
    look, again, entered = (code.fresh(name) for name in ("look", "again", "entered"))
    code.branch(look)
    code.label(look)
    before = code.emit(I32, f"atomicrmw xchg {lock}, i32 1 acquire")
    code.branch_if(code.compare("icmp eq", before, 0), entered, again)
    code.label(again)
    pause(code)
    code.call_external("sched_yield", I32, attributes="nounwind")
    code.branch(look)
    code.label(entered)
    yield
    code.do(f"store atomic i32 0, {lock} release, align 4")


# --- elements --------------------------------------------------------------------------------------------------------


def _to_accumulator(code: Code, x: Reg, dtype: DType) -> Reg:
    """Convert a float to the dtype of its sums; 8-bit floats by a table."""
    if not is_float8(dtype):
        return convert(code, x, dtype, accumulator(dtype))
    table = code.module.data("floats", np.arange(256, dtype=np.uint8).view(dtype).astype(F32))
    return code.load(Type("float"), code.gep(table, code.cast("zext", x, "i64"), "float"))


def _guarded(code: Code, condition: Reg | None, action: Callable[[], None]) -> None:
    if condition is None:
        action()
        return
    with code.when(condition):
        action()


# --- atomic instructions ----------------------------------------------------------------------------------------------


def _atomic_update(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    dtype = op.ref.ref.dtype
    kind = kind_of(dtype)
    if kind == "float":
        _exchange_extreme(code, op, x, address)
        return
    name: str = op.kind
    if kind == "bool":
        name = on_bools(name)
    elif kind == "unsigned" and name in ("max", "min"):
        name = f"u{name}"
    code.do(f"{code.fresh_value()} = atomicrmw {name} ptr {address.text}, {to_memory(code, x, dtype)} monotonic")


def _exchange_extreme(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    """Replace an element by the extreme of the element and `x`: a loop of compare-and-exchange."""
    dtype = op.ref.ref.dtype
    type, scalar = memory_type(dtype).integer, register_type(dtype).scalar
    before = code.emit(type, f"load atomic {type}, {address} monotonic, align {type.bits // 8}")
    start = code.here
    again, done = code.fresh("again"), code.fresh("done")
    seen, swapped = Reg(code.fresh_value(), type), code.fresh_value()
    code.branch(again)
    code.label(again)
    code.do(f"{seen.text} = phi {type} [{before.text}, %{start}], [{swapped}, %{again}]")
    now = code.cast("bitcast", seen, scalar)
    old, new = (now, x) if dtype in (F32, F64) else (_to_accumulator(code, now, dtype), _to_accumulator(code, x, dtype))
    better = code.compare("fcmp ogt" if op.kind == "max" else "fcmp olt", new, old)
    better = code.binary("or", better, code.compare("fcmp uno", new, new))  # NaN wins, the first one stays
    takes = code.binary("and", better, code.compare("fcmp ord", old, old))
    replacement = code.cast("bitcast", code.select(takes, x, now), type.scalar)
    pair, won = code.fresh_value(), Reg(code.fresh_value(), I1)
    code.do(f"{pair} = cmpxchg ptr {address.text}, {seen}, {replacement} monotonic monotonic")
    code.do(f"{swapped} = extractvalue {{ {type}, i1 }} {pair}, 0")
    code.do(f"{won.text} = extractvalue {{ {type}, i1 }} {pair}, 1")
    code.branch_if(won, done, again)
    code.label(done)
