"""What goes along one dim: reductions of other dims than the last, scans, arg-reductions, sorts."""

from __future__ import annotations

import numpy as np

from tilekern.ir.compute import Reduce, identity
from tilekern.ir.ordering import ArgReduce, Scan, Sort
from tilekern.ir.types import I32 as INT32
from tilekern.ir.types import kind_of
from tilekern.lower.llvm.code import I32, I64, Code, Reg, constant
from tilekern.lower.llvm.elements import Elements, index_of
from tilekern.lower.llvm.elementwise import compute, extreme
from tilekern.lower.llvm.functions import function
from tilekern.lower.llvm.groups import combine, combined, cover, over
from tilekern.lower.llvm.index import Index, Place
from tilekern.lower.llvm.steps import Step
from tilekern.lower.llvm.types import known


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


# --- sorts -----------------------------------------------------------------------------------------------------------


def bytes_of_sort(op: Sort) -> int:
    """Two lines of positions."""
    return 2 * 4 * op.result.tile.shape[op.dim]


def sort(e: Elements, step: Step) -> None:
    """Positions in the order of integer keys: a merge sort of each line, from runs of one element on."""
    op = step.op
    assert isinstance(op, Sort) and step.temporary is not None
    shape, dim = op.result.tile.shape, op.dim
    length = shape[dim]

    def line(place: Place) -> None:
        code = e.code
        now = e.slot(step.temporary) if step.temporary is not None else e.scratch
        other = code.at(now, 4 * length)

        def begin(i: Reg) -> None:
            code.store(code.cast("trunc", i, "i32"), code.at(now, i, "i32"))

        code.loop(0, length, 1, begin)
        width = 1
        while width < length:
            _merge_runs(e, op, place, now, other, width)
            now, other, width = other, now, 2 * width

        def finish(i: Reg) -> None:
            with e.scope():
                found = code.load(I32, code.at(now, i, "i32"))
                e.put(op.result, found, _with(place, dim, index_of(i)))

        code.loop(0, length, 1, finish)

    over(e, (*shape[:dim], *shape[dim + 1 :]), line)


def _merge_runs(e: Elements, op: Sort, place: Place, source: Reg, target: Reg, width: int) -> None:
    """Merge neighbouring runs of `width` positions."""
    code, length = e.code, op.result.tile.shape[op.dim]

    def pair(left: Reg) -> None:
        with e.scope():
            middle = code.intrinsic("llvm.smin", code.binary("add", left, width), length)
            end = code.intrinsic("llvm.smin", code.binary("add", left, 2 * width), length)

            def step(at: Reg, i: Reg, j: Reg) -> list[Reg]:
                with e.scope():
                    first, second = (_position(e, source, n, length) for n in (i, j))
                    smaller = _less(e, op, place, second, first)
                    out = code.compare("icmp sge", j, end)
                    stays = code.binary("or", out, code.binary("xor", smaller, 1))
                    takes = code.binary("and", code.compare("icmp slt", i, middle), stays)
                    code.store(code.select(takes, first, second), code.at(target, at, "i32"))
                    one = code.cast("zext", takes, "i64")
                    return [code.binary("add", i, one), code.binary("add", j, code.binary("sub", 1, one))]

            code.loop(left, end, 1, step, left, middle)

    # `left` as a value, so that the loop inside is one of unknown bounds.
    code.loop(0, length, 2 * width, pair)


def _position(e: Elements, source: Reg, at: Reg, length: int) -> Reg:
    """The position that stands at a place; of a place behind the end, any."""
    inside = e.code.intrinsic("llvm.smin", at, length - 1)
    return e.code.load(I32, e.code.at(source, inside, "i32"))


def _less(e: Elements, op: Sort, place: Place, a: Reg, b: Reg) -> Reg:
    """Whether the keys at one position come before those at another: the first key that differs decides."""
    code = e.code
    found: Reg | None = None
    for key in reversed(op.operands[: op.num_keys]):
        first, second = (e.at(key, _with(place, op.dim, index_of(code.cast("sext", p, "i64")))) for p in (a, b))
        less = compute(code, "lt", key.tile.dtype, first, second)
        equal = code.compare("icmp eq", first, second)
        found = less if found is None else code.binary("or", less, code.binary("and", equal, found))
    assert found is not None
    assert all(kind_of(key.tile.dtype) in ("signed", "unsigned") for key in op.operands)
    return found
