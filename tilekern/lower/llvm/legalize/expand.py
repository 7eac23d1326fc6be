"""Write the ops that the emitter lacks by ops that it has; `legalize_dtypes` does the same for dtypes.

arg-reductions, sorts, top-k   of integer keys; a top-k has keys of 32 bits
assertions                     of one bool
dots                           see `dots`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ml_dtypes

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.debug import Assert
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import F32, kind_of
from tilekern.lower.llvm.legalize.dots import expand_dot
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.expand_order import expand_sort, expand_top_k, picks_places
from tilekern.lower.rewrite.sort_key import sort_key


def expand(func: Func, machine: Machine) -> Func:
    """Apply the rewrites above."""
    return Rewriter(partial(_rule, machine)).run(func)


def _rule(machine: Machine, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Assert() if op.operands[0].tile.shape:
            rewriter.add(Assert(operands=(_all(make, op.operands[0]),), message=op.message, loc=op.loc))
            return []
        case ArgReduce():
            replacement = make.add(ArgReduce, _key(make, op), extreme=op.extreme, dim=op.dim)
        case Sort() | TopK() if not op.result.tile.size:
            replacement = make.number(0, op.result.tile)
        case Sort():
            replacement = None if _is_expanded(op, rewriter) else expand_sort(make, op, rewriter)
        case TopK() if op.operands[0].tile.dtype.itemsize == 8:
            replacement = expand_top_k(make, op)
        case TopK():
            replacement = make.add(TopK, sort_key(make, op.operands[0]), dim=op.dim, k=op.k)
        case Dot():
            replacement = expand_dot(make, op, machine, rewriter)
        case _:
            return None
    return None if replacement is None else [replacement]


def _all(make: Make, x: Value) -> Value:
    """True if all elements of a tile of bools are True."""
    for dim in reversed(range(len(x.tile.shape))):
        x = make.reduce(x, "and", dim)
    return x


def _key(make: Make, op: ArgReduce) -> Value:
    """Integer keys in the order of the elements; NaN comes first, for both extremes."""
    (x,) = op.operands
    key = sort_key(make, x)
    if op.extreme == "max" or kind_of(x.tile.dtype) != "float":
        return key
    least = int(ml_dtypes.iinfo(key.tile.dtype).min)
    wide = make.convert(x, F32) if x.tile.dtype.itemsize < 4 else x
    return make.select(make.of("ne", wide, wide), least, key)


def _is_expanded(op: Sort, rewriter: Rewriter) -> bool:
    """True for a sort by integer keys that finds positions, the form that the emitter has."""
    keys = all(kind_of(x.tile.dtype) in ("signed", "unsigned") for x in op.operands)
    return keys and op.pick == op.num_keys == len(op.operands) - 1 and picks_places(op, rewriter)
