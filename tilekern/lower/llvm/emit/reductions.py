"""Ops along one dim: reductions of other dims than the last, scans, arg-reductions."""

from __future__ import annotations

import numpy as np

from tilekern.ir.compute import Reduce, identity
from tilekern.ir.ordering import ArgReduce, Scan
from tilekern.ir.types import I32 as INT32
from tilekern.lower.llvm.element_index import Index, Place
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute, extreme
from tilekern.lower.llvm.emit.loop_nests import combine, combined, cover
from tilekern.lower.llvm.ir_builder import I64, Code, Reg, constant
from tilekern.lower.llvm.llvm_types import known
from tilekern.lower.llvm.math.functions import function


def _with(place: Place, dim: int, index: Index) -> Place:
    """A place with one index more."""
    return (*place[:dim], index, *place[dim:])


def reduce(e: Elements, op: Reduce) -> None:
    """Reduce a dim that is not the last one."""
    (dim,), (x,) = op.dims, op.operands
    start = np.asarray(identity(op.monoid, op.result.tile.dtype))

    def body(place: Place, lanes: int) -> None:
        def step(k: Reg, total: Reg) -> list[Reg]:
            with e.scope():
                return [combine(e.code, op, total, e.at(x, _with(place, dim, index_of(k)), lanes))]

        (total,) = e.code.loop(0, x.tile.shape[dim], 1, step, known(start, op.result.tile.dtype, lanes))
        e.put(op.result, total, place)

    cover(e, op.result.tile.shape, body)


def scan(e: Elements, op: Scan) -> None:
    """Every element combined with all before it; lines are vectors where the dim is not the last one."""
    (x,), shape = op.operands, op.result.tile.shape
    length = shape[op.dim]

    def body(place: Place, lanes: int) -> None:
        def index(k: Reg) -> Index:
            return index_of(k).times(-1).shifted(length - 1) if op.reverse else index_of(k)

        def step(k: Reg, total: Reg) -> list[Reg]:
            with e.scope():
                where = _with(place, op.dim, index(k))
                found = _accumulated(e.code, op, total, e.at(x, where, lanes))
                e.put(op.result, found, where)
                return [found]

        first = _with(place, op.dim, index(constant(0, I64)))
        begin = e.at(x, first, lanes)
        e.put(op.result, begin, first)
        e.code.loop(1, length, 1, step, begin)

    if length:
        cover(e, (*shape[: op.dim], *shape[op.dim + 1 :]), body, scalars=op.dim == len(shape) - 1)


def _accumulated(code: Code, op: Scan, x: Reg, y: Reg) -> Reg:
    if op.monoid != "logsumexp":
        return combined(code, op.monoid, op.result.tile.dtype, x, y)
    # max + log(1 + exp(min - max)); of equal numbers, infinities among them, the logarithm of 2 more.
    distance = code.intrinsic("llvm.fabs", code.binary("fsub", x, y))
    small = function(code, "exp", code.unary("fneg", distance))
    assert small is not None
    rest = function(code, "log1p", small)
    assert rest is not None
    found = code.binary("fadd", extreme(code, "max", x, y), rest)
    return code.select(code.compare("fcmp oeq", x, y), code.binary("fadd", x, float(np.log(2))), found)


def arg_reduce(e: Elements, op: ArgReduce) -> None:
    """The first of the greatest or least integers."""
    (x,), code = op.operands, e.code
    shape, dtype = x.tile.shape, x.tile.dtype

    def body(place: Place, lanes: int) -> None:
        def step(k: Reg, best: Reg, where: Reg) -> list[Reg]:
            with e.scope():
                found = e.at(x, _with(place, op.dim, index_of(k)), lanes)
                better = compute(code, "gt" if op.extreme == "max" else "lt", dtype, found, best)
                here = code.splat(code.cast("trunc", k, "i32"), lanes)
                return [code.select(better, found, best), code.select(better, here, where)]

        first = e.at(x, _with(place, op.dim, Index()), lanes)
        _, where = code.loop(1, shape[op.dim], 1, step, first, known(0, INT32, lanes))
        e.put(op.result, where, place)

    cover(e, op.result.tile.shape, body, scalars=op.dim == len(shape) - 1)
