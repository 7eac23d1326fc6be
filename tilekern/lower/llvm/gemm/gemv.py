"""Dots of a few rows, without packing: each element of the right operand is used only once for each row."""

from __future__ import annotations

from tilekern.ir.types import kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import ZERO, Coords, Index
from tilekern.lower.llvm.element_types import element_constant
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import reduce_lanes, tail_pieces
from tilekern.lower.llvm.gemm.microkernel import accumulate
from tilekern.lower.llvm.gemm.prefetch import Prefetcher
from tilekern.lower.llvm.gemm.shapes import DotShape
from tilekern.lower.llvm.ir_values import Reg
from tilekern.lower.llvm.runtime.machine import Machine


def emit(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Emit a product of a few rows; if `adds`, it is added to the values at `out`."""
    if shape.contract[1] == len(shape.op.operands[1].tile.shape) - 1:
        _by_columns(e, shape, batch, out, adds)
    else:
        _by_depth(e, shape, batch, out, adds)


def _element(e: Elements, shape: DotShape, side: int, batch: Coords, k: Index, free: Index, lanes: int) -> Reg:
    return e.element(shape.op.operands[side], shape.coords(side, batch, k, free), lanes)


def _store_sum(e: Elements, shape: DotShape, total: Reg, row: int, column: Index, out: Reg, adds: bool) -> None:
    code, matrix = e.code, (shape.rows, shape.columns)
    coords = (Index(const=row), column)
    if adds:
        before = e.load(out, matrix, shape.sum_dtype, coords, total.type.lanes)
        total = code.binary("fadd" if kind_of(shape.sum_dtype) == "float" else "add", before, total)
    e.store(total, out, matrix, shape.sum_dtype, coords)


def _by_columns(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Multiply by an operand that is contiguous along k: vectors along k, several columns at once."""
    code, lanes = e.code, e.code.module.machine.lanes
    dtype, whole = shape.sum_dtype, shape.depth // lanes * lanes

    def columns(first: Index, count: int) -> None:
        sums = [(r, n) for r in range(shape.rows) for n in range(count)]

        def products(k: Index, width: int, totals: list[Reg]) -> list[Reg]:
            left = [_element(e, shape, 0, batch, k, Index(const=r), width) for r in range(shape.rows)]
            right = [_element(e, shape, 1, batch, k, first.shifted(n), width) for n in range(count)]
            return [accumulate(code, dtype, t, left[r], right[n]) for t, (r, n) in zip(totals, sums, strict=True)]

        def body(k: Reg, *totals: Reg) -> list[Reg]:
            with e.scope():
                return products(index_of(k, 1), lanes, list(totals))

        zero = element_constant(0, dtype, lanes)
        results = [reduce_lanes(code, "sum", dtype, x) for x in code.loop(0, whole, lanes, body, *[zero] * len(sums))]
        for at, width in tail_pieces(shape.depth, lanes):
            with e.scope():
                tail = products(
                    Index((), at, 1 if width else 0), width, [element_constant(0, dtype, width)] * len(sums)
                )
                tail = [reduce_lanes(code, "sum", dtype, x) for x in tail]
                name = "fadd" if kind_of(dtype) == "float" else "add"
                results = [code.binary(name, x, y) for x, y in zip(results, tail, strict=True)]
        for x, (r, n) in zip(results, sums, strict=True):
            _store_sum(e, shape, x, r, first.shifted(n), out, adds)

    def several(n: Reg) -> None:
        with e.scope():
            columns(index_of(n), calibration.ACCUMULATORS)

    even = shape.columns // calibration.ACCUMULATORS * calibration.ACCUMULATORS
    code.loop(0, even, calibration.ACCUMULATORS, several)
    for n in range(even, shape.columns):
        with e.scope():
            columns(Index(const=n), 1)


def _by_depth(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Multiply by an operand whose columns are contiguous: several vectors of columns at once, in a loop over k."""
    code, lanes = e.code, e.code.module.machine.lanes
    prefetcher = Prefetcher(e, shape.op.operands[1], ZERO, 1)

    def columns(first: Index, widths: list[tuple[int, int]]) -> None:
        sums = [(r, at, width) for r in range(shape.rows) for at, width in widths]

        def body(k: Reg, *totals: Reg) -> list[Reg]:
            with e.scope():
                index = index_of(k)
                prefetcher.prefetch_row(shape.coords(1, batch, index, first), sum(width or 1 for _, width in widths))
                left = [_element(e, shape, 0, batch, index, Index(const=r), 0) for r in range(shape.rows)]
                right = {
                    at: _element(e, shape, 1, batch, index, _lanes(first, at, width), width) for at, width in widths
                }
                return [
                    accumulate(code, shape.sum_dtype, t, code.splat(left[r], width), right[at])
                    for t, (r, at, width) in zip(totals, sums, strict=True)
                ]

        zeros = [element_constant(0, shape.sum_dtype, width) for _, _, width in sums]
        for x, (r, at, width) in zip(code.loop(0, shape.depth, 1, body, *zeros), sums, strict=True):
            _store_sum(e, shape, x, r, _lanes(first, at, width), out, adds)

    vectors_at_once = max(1, _sums(e.code.module.machine) // shape.rows)
    step = vectors_at_once * lanes

    def several(n: Reg) -> None:
        with e.scope():
            columns(index_of(n), [(v * lanes, lanes) for v in range(vectors_at_once)])

    even = shape.columns // step * step
    code.loop(0, even, step, several)
    vectors = [(at, lanes) for at in range(even, shape.columns - lanes + 1, lanes)]
    with e.scope():
        widths = [*vectors, *tail_pieces(shape.columns, lanes)]
        if widths:
            columns(Index(), widths)


def _sums(machine: Machine) -> int:
    """Registers of sums. Many columns side by side are long pieces of each row, which the CPU prefetches."""
    return machine.registers // 2


def _lanes(first: Index, at: int, width: int) -> Index:
    """The index of a vector of neighbouring columns."""
    return Index(first.terms, first.const + at, 1 if width else 0)
