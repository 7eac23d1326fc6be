"""Reductions of dims other than the last, scans and arg-reductions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilekern.ir.compute import Reduce, identity
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan
from tilekern.ir.types import I32 as INT32
from tilekern.lower.llvm.element_index import Coords, Index, insert_index
from tilekern.lower.llvm.element_types import element_constant
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute, extreme
from tilekern.lower.llvm.emit.loop_nests import apply_monoid, combine, for_each_vector, for_neighbours
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I64, Reg, constant
from tilekern.lower.llvm.math.functions import emit_function


def reduce(e: Elements, op: Reduce) -> None:
    """Reduce a dim that is not the last."""
    (dim,), (x,) = op.dims, op.operands
    start = np.asarray(identity(op.monoid, op.result.tile.dtype))

    def body(coords: list[Coords], lanes: int) -> None:
        def step(k: Reg, *totals: Reg) -> list[Reg]:
            with e.scope():
                elements = [e.element(x, insert_index(c, dim, index_of(k)), lanes) for c in coords]
                return [combine(e.code, op, total, y) for total, y in zip(totals, elements, strict=True)]

        starts = [element_constant(start, op.result.tile.dtype, lanes)] * len(coords)
        for total, c in zip(e.code.loop(0, x.tile.shape[dim], 1, step, *starts), coords, strict=True):
            e.write(op.result, total, c)

    for_neighbours(e, op.result.tile.shape, body)


def scan(e: Elements, op: Scan) -> None:
    """Combine every element with all before it. Lanes are different lines, unless the dim is the last."""
    (x,) = op.operands

    def first(where: Coords, lanes: int) -> Reg:
        return e.element(x, where, lanes)

    def following(total: Reg, where: Coords, lanes: int) -> Reg:
        return _combine_scan(e.code, op, total, e.element(x, where, lanes))

    _follow(e, op, following, first)


def linear_scan(e: Elements, op: LinearScan) -> None:
    """Multiply the last result, in registers, by a factor and add a term. Lanes are as in scans."""
    factors, terms = op.operands

    def following(state: Reg, where: Coords, lanes: int) -> Reg:
        return e.code.fma(e.element(factors, where, lanes), state, e.element(terms, where, lanes))

    _follow(e, op, following)


def _follow(
    e: Elements,
    op: Scan | LinearScan,
    following: Callable[[Reg, Coords, int], Reg],
    first: Callable[[Coords, int], Reg] | None = None,
) -> None:
    """Write the elements of each line: `first`, then `following` of each element before; without `first`, of 0."""
    shape, dim = op.result.tile.shape, op.dim
    length = shape[dim]

    def body(coords: list[Coords], lanes: int) -> None:
        def write(value: Reg, where: Coords) -> Reg:
            e.write(op.result, value, where)
            return value

        def places(k: Reg) -> list[Coords]:
            index = index_of(k).times(-1).shifted(length - 1) if op.reverse else index_of(k)
            return [insert_index(c, dim, index) for c in coords]

        def step(k: Reg, *last: Reg) -> list[Reg]:
            with e.scope():
                return [write(following(x, at, lanes), at) for x, at in zip(last, places(k), strict=True)]

        if first is None:
            begins = [element_constant(0, op.result.tile.dtype, lanes)] * len(coords)
        else:
            begins = [write(first(at, lanes), at) for at in places(constant(0, I64))]
        e.code.loop(0 if first is None else 1, length, 1, step, *begins)

    if length:
        for_neighbours(e, (*shape[:dim], *shape[dim + 1 :]), body, scalars=dim == len(shape) - 1)


def _combine_scan(code: Code, op: Scan, x: Reg, y: Reg) -> Reg:
    if op.monoid != "logsumexp":
        return apply_monoid(code, op.monoid, op.result.tile.dtype, x, y)
    # max + log(1 + exp(min - max)). For equal numbers, infinities included: x + log 2.
    distance = code.intrinsic("llvm.fabs", code.binary("fsub", x, y))
    small = emit_function(code, "exp", code.unary("fneg", distance))
    assert small is not None
    correction = emit_function(code, "log1p", small)
    assert correction is not None
    result = code.binary("fadd", extreme(code, "max", x, y), correction)
    return code.select(code.compare("fcmp oeq", x, y), code.binary("fadd", x, float(np.log(2))), result)


def arg_reduce(e: Elements, op: ArgReduce) -> None:
    """Find the position of the first extreme, of integers."""
    (x,), code = op.operands, e.code
    shape, dtype = x.tile.shape, x.tile.dtype

    def body(coords: Coords, lanes: int) -> None:
        def step(k: Reg, best: Reg, where: Reg) -> list[Reg]:
            with e.scope():
                element = e.element(x, insert_index(coords, op.dim, index_of(k)), lanes)
                better = compute(code, "gt" if op.extreme == "max" else "lt", dtype, element, best)
                here = code.splat(code.cast("trunc", k, "i32"), lanes)
                return [code.select(better, element, best), code.select(better, here, where)]

        first = e.element(x, insert_index(coords, op.dim, Index()), lanes)
        _, where = code.loop(1, shape[op.dim], 1, step, first, element_constant(0, INT32, lanes))
        e.write(op.result, where, coords)

    for_each_vector(e, op.result.tile.shape, body, scalars=op.dim == len(shape) - 1)
