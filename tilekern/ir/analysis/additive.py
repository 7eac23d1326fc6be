"""Outputs that are sums over the tiles of folds: on a part of the tiles they are addends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilekern.ir.carries import Carry, carries
from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic, Store, WriteOp
from tilekern.ir.shape import Broadcast, Concatenate, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import kind_of

_MOVES = (Broadcast, Reshape, Transpose, Slice, Reverse)


def addends(func: Func, folds: Sequence[Fold]) -> set[Value] | None:
    """The outputs that are sums over the tiles of folds; None if results of the folds are anything else, too.

    The folds stand in the body itself. Each iteration adds to their carries, which begin at 0, what depends on none of
    them. On the way to stores, only linear ops use the results.
    """
    defined = definitions(func)
    if not all(fold in func.body.ops and _adds_up(fold, defined) for fold in folds):
        return None
    active = {r for fold in folds for r in fold.results}
    for op in func.body.ops:
        if active.isdisjoint(op.uses()):
            continue
        if isinstance(op, WriteOp):
            adds = isinstance(op, Store) or (isinstance(op, Atomic) and op.kind == "add")
            if not adds or not active.isdisjoint(op.operands[2:]):
                return None
        elif op.regions or not is_linear(op, active):
            return None
        active.update(op.results)
    writes = [op for op in func.walk() if isinstance(op, WriteOp)]
    found = {op.ref for op in writes if op.value in active}
    return found if all(op.value in active for op in writes if op.ref in found) else None


def _adds_up(fold: Fold, defined: Mapping[Value, Op]) -> bool:
    used = [*(v for op in fold.body.ops for v in op.uses()), *fold.body.results]
    return all(_is_sum(carry, fold, defined) and used.count(carry.args[0]) == 1 for carry in carries(fold))


def _is_sum(carry: Carry, fold: Fold, defined: Mapping[Value, Op]) -> bool:
    """True if a carry begins at 0, and becomes the sum of itself and another value of the fold's body."""
    op = defined.get(carry.yielded)
    adds = isinstance(op, Elementwise) and op.function == "add" and carry.args[0] in op.operands
    return adds and op in fold.body.ops and kind_of(carry.init.tile.dtype) == "float" and is_zero(carry.init, defined)


def is_zero(value: Value, defined: Mapping[Value, Op]) -> bool:
    """True for a constant of zeros."""
    op = defined.get(value)
    if isinstance(op, (Broadcast, Reshape, Convert)):
        return is_zero(op.operands[0], defined)
    return isinstance(op, Constant) and not op.array.any()


def is_linear(op: Op, active: Collection[Value]) -> bool:
    """True if the result of an op is linear in its active operands, and 0 where these are."""
    which = [v in active for v in op.operands]
    match op:
        case Convert():
            return kind_of(op.dtype) == "float"
        case Reduce():
            return op.monoid == "sum"
        case Elementwise(function="neg"):
            return True
        case Elementwise(function="add" | "sub") | Concatenate():
            return all(which)
        case Elementwise(function="mul") | Dot():
            return sum(which) == 1
        case Elementwise(function="div"):
            return which == [True, False]
        case Select():
            return which == [False, True, True]
        case _:
            return isinstance(op, _MOVES)
