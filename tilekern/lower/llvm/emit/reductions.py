"""Reductions of dims other than the last, scans and arg-reductions."""

from __future__ import annotations

import numpy as np

from tilekern.ir.compute import Reduce, identity
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan
from tilekern.ir.types import I32 as INT32
from tilekern.lower.llvm.element_index import Coords, Index, insert_index
from tilekern.lower.llvm.element_types import element_constant
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute, extreme
from tilekern.lower.llvm.emit.loop_nests import apply_monoid, combine, for_each_vector
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I64, Reg, constant
from tilekern.lower.llvm.math.functions import emit_function


def reduce(e: Elements, op: Reduce) -> None:
    """Reduce a dim that is not the last one."""
    (dim,), (x,) = op.dims, op.operands
    start = np.asarray(identity(op.monoid, op.result.tile.dtype))

    def body(coords: Coords, lanes: int) -> None:
        def step(k: Reg, total: Reg) -> list[Reg]:
            with e.scope():
                return [combine(e.code, op, total, e.element(x, insert_index(coords, dim, index_of(k)), lanes))]

        (total,) = e.code.loop(0, x.tile.shape[dim], 1, step, element_constant(start, op.result.tile.dtype, lanes))
        e.write(op.result, total, coords)

    for_each_vector(e, op.result.tile.shape, body)


def scan(e: Elements, op: Scan) -> None:
    """Combine every element with all before it. Lanes are different lines, unless the dim is the last one."""
    (x,), shape = op.operands, op.result.tile.shape
    length = shape[op.dim]

    def body(coords: Coords, lanes: int) -> None:
        def index(k: Reg) -> Index:
            return index_of(k).times(-1).shifted(length - 1) if op.reverse else index_of(k)

        def step(k: Reg, total: Reg) -> list[Reg]:
            with e.scope():
                where = insert_index(coords, op.dim, index(k))
                found = _combine_scan(e.code, op, total, e.element(x, where, lanes))
                e.write(op.result, found, where)
                return [found]

        first = insert_index(coords, op.dim, index(constant(0, I64)))
        begin = e.element(x, first, lanes)
        e.write(op.result, begin, first)
        e.code.loop(1, length, 1, step, begin)

    if length:
        for_each_vector(e, (*shape[: op.dim], *shape[op.dim + 1 :]), body, scalars=op.dim == len(shape) - 1)


def linear_scan(e: Elements, op: LinearScan) -> None:
    """Multiply the last result, in registers, by a factor and add a term. Lanes are as those of scans."""
    factors, terms = op.operands
    shape = op.result.tile.shape
    length = shape[op.dim]

    def body(coords: Coords, lanes: int) -> None:
        def step(k: Reg, state: Reg) -> list[Reg]:
            with e.scope():
                index = index_of(k).times(-1).shifted(length - 1) if op.reverse else index_of(k)
                where = insert_index(coords, op.dim, index)
                factor, term = (e.element(x, where, lanes) for x in (factors, terms))
                found = e.code.fma(factor, state, term)
                e.write(op.result, found, where)
                return [found]

        e.code.loop(0, length, 1, step, element_constant(0, op.result.tile.dtype, lanes))

    if length:
        for_each_vector(e, (*shape[: op.dim], *shape[op.dim + 1 :]), body, scalars=op.dim == len(shape) - 1)


def _combine_scan(code: Code, op: Scan, x: Reg, y: Reg) -> Reg:
    if op.monoid != "logsumexp":
        return apply_monoid(code, op.monoid, op.result.tile.dtype, x, y)
    # max + log(1 + exp(min - max)). For equal numbers, infinities included: x + log 2.
    distance = code.intrinsic("llvm.fabs", code.binary("fsub", x, y))
    small = emit_function(code, "exp", code.unary("fneg", distance))
    assert small is not None
    rest = emit_function(code, "log1p", small)
    assert rest is not None
    found = code.binary("fadd", extreme(code, "max", x, y), rest)
    return code.select(code.compare("fcmp oeq", x, y), code.binary("fadd", x, float(np.log(2))), found)


def arg_reduce(e: Elements, op: ArgReduce) -> None:
    """Find the position of the first extreme, of integers."""
    (x,), code = op.operands, e.code
    shape, dtype = x.tile.shape, x.tile.dtype

    def body(coords: Coords, lanes: int) -> None:
        def step(k: Reg, best: Reg, where: Reg) -> list[Reg]:
            with e.scope():
                found = e.element(x, insert_index(coords, op.dim, index_of(k)), lanes)
                better = compute(code, "gt" if op.extreme == "max" else "lt", dtype, found, best)
                here = code.splat(code.cast("trunc", k, "i32"), lanes)
                return [code.select(better, found, best), code.select(better, here, where)]

        first = e.element(x, insert_index(coords, op.dim, Index()), lanes)
        _, where = code.loop(1, shape[op.dim], 1, step, first, element_constant(0, INT32, lanes))
        e.write(op.result, where, coords)

    for_each_vector(e, op.result.tile.shape, body, scalars=op.dim == len(shape) - 1)
