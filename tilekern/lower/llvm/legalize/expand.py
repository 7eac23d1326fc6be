"""Write the ops that the emitter lacks in terms of those that it has.

functions     of bools by `and`, `or`, ...; of floats narrower than float32 in float32, rounded once
casts         from or to 8-bit floats by their bits; to narrow floats only from float32
reductions    along one dim, of at least 32 bits or bool
assertions    of one bool
arg-reduces, sorts, top-k: of integer keys; a top-k has keys of 32 bits
dots          see `dots`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ml_dtypes

from tilekern.ir.compute import Convert, Dot, Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.debug import Assert
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import BOOL, F32, I32, kind_of
from tilekern.lower.llvm.legalize.casts import cast, converted, is_narrow
from tilekern.lower.llvm.legalize.dots import expand_dot
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.expand_order import expand_sort, expand_top_k, picks_places
from tilekern.lower.rewrite.logical import expand_logical
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.sort_key import sort_key


def expand(func: Func, machine: Machine) -> Func:
    """Apply the rewrites above."""
    return Rewriter(partial(_rule, machine)).run(func)


def expand_casts(func: Func) -> Func:
    """Apply those of casts, which the other rewrites make, too."""
    return Rewriter(_only_casts).run(func)


def _rule(machine: Machine, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Assert() if op.operands[0].tile.shape:
            rewriter.add(Assert(operands=(_all(make, op.operands[0]),), message=op.message, loc=op.loc))
            return []
        case Convert():
            found = converted(make, op.operands[0], op.dtype)
        case Iota() if op.dtype != I32:
            found = cast(make, make.lanes(op.shape, op.dim), op.dtype)
        case Elementwise():
            found = _elementwise(make, op)
        case Reduce():
            found = _reduce(make, op)
        case Scan() if is_narrow(op.result.tile.dtype):
            found = cast(make, make.again(op, cast(make, op.operands[0], F32)), op.result.tile.dtype)
        case ArgReduce():
            found = make.add(ArgReduce, _key(make, op), extreme=op.extreme, dim=op.dim)
        case Sort() | TopK() if not op.result.tile.size:
            found = make.number(0, op.result.tile)
        case Sort():
            found = None if _is_expanded(op, rewriter) else expand_sort(make, op, rewriter)
        case TopK() if op.operands[0].tile.dtype.itemsize == 8:
            found = expand_top_k(make, op)
        case TopK():
            found = make.add(TopK, sort_key(make, op.operands[0]), dim=op.dim, k=op.k)
        case Dot():
            found = expand_dot(make, op, machine, rewriter)
        case _:
            return None
    return None if found is None else [found]


def _only_casts(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    found = converted(Make(rewriter, op), op.operands[0], op.dtype) if isinstance(op, Convert) else None
    return None if found is None else [found]


# --- elementwise ---------------------------------------------------------------------------------------------------


def _elementwise(make: Make, op: Elementwise) -> Value | None:
    dtype, result = op.operands[0].tile.dtype, op.result.tile.dtype
    if dtype == BOOL:
        return expand_logical(make, op, lambda x: make.convert(x, I32))
    if op.function == "nextafter" or (op.function == "sign" and kind_of(dtype) != "float"):
        return expand_bits(make, op)
    if not is_narrow(dtype):
        return None
    wide = make.of(op.function, *(cast(make, x, F32) for x in op.operands))
    return wide if result == BOOL else cast(make, wide, result)


# --- along a dim ---------------------------------------------------------------------------------------------------


def _reduce(make: Make, op: Reduce) -> Value | None:
    """One dim after the other; narrow floats in float32, bools by `and` and `or`."""
    (x,) = op.operands
    dtype = x.tile.dtype
    monoid = {"max": "or", "min": "and"}.get(op.monoid, op.monoid) if dtype == BOOL else op.monoid
    if len(op.dims) == 1 and monoid == op.monoid and not is_narrow(dtype):
        return None
    total = cast(make, x, F32) if is_narrow(dtype) else x
    for dim in sorted(op.dims, reverse=True):
        total = make.reduce(total, monoid, dim)
    return cast(make, total, dtype)


def _all(make: Make, x: Value) -> Value:
    """Whether all elements of a tile of bools hold."""
    for dim in reversed(range(len(x.tile.shape))):
        x = make.reduce(x, "and", dim)
    return x


def _key(make: Make, op: ArgReduce) -> Value:
    """Integers whose order is that of the elements, but that NaN comes first."""
    (x,) = op.operands
    key = sort_key(make, x)
    if op.extreme == "max" or kind_of(x.tile.dtype) != "float":
        return key
    least = int(ml_dtypes.iinfo(key.tile.dtype).min)
    wide = cast(make, x, F32) if is_narrow(x.tile.dtype) else x
    return make.select(make.of("ne", wide, wide), least, key)


def _is_expanded(op: Sort, rewriter: Rewriter) -> bool:
    """Whether a sort of integer keys finds positions."""
    keys = all(kind_of(x.tile.dtype) in ("signed", "unsigned") for x in op.operands)
    return keys and op.pick == op.num_keys == len(op.operands) - 1 and picks_places(op, rewriter)
