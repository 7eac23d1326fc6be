"""Outputs that are sums over the tiles of folds: on a part of the tiles they are addends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilekern.ir.carries import Carry, carries
from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic, Load, Store, WriteOp
from tilekern.ir.shape import Broadcast, Concatenate, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import kind_of

_MOVES = (Broadcast, Reshape, Transpose, Slice, Reverse)


def addends(func: Func, folds: Sequence[Fold]) -> set[Value] | None:
    """The outputs that are sums over the tiles of folds; None if a result of a fold becomes anything but a sum.

    The carries of the folds begin at 0, and each iteration adds a value that depends on no carry. Only linear ops use
    the results before they are stored. Loops around the folds may carry the results, in carries that begin at 0.
    """
    defined = definitions(func)
    if not all(_adds_up(fold, defined) for fold in folds):
        return None
    active = _active(func, folds)
    if any(not active.isdisjoint(fold.uses()) for fold in folds):  # an addend depends on the sums of other tiles
        return None
    ops = [op for op in func.walk() if op not in folds]
    if not all(_keeps_sums(op, active, defined) for op in ops):
        return None
    writes = [op for op in ops if isinstance(op, WriteOp)]
    sums = {op.ref for op in writes if op.value in active}
    if any(isinstance(op, Load) and op.ref in sums for op in ops):  # the loaded sum is not among the active values
        return None
    # An element of an "inout" array that the kernel does not write is whole on each device, and no addend.
    is_sum = all(op.value in active and op.ref.ref.role != "inout" for op in writes if op.ref in sums)
    return sums if is_sum else None


def _active(func: Func, folds: Sequence[Fold]) -> set[Value]:
    """The results of folds, and all values that are computed from such results."""
    active, count = {r for fold in folds for r in fold.results}, -1
    while len(active) > count:  # carries lead back to the first ops of a loop
        count = len(active)
        for op in func.walk():
            if op in folds:
                continue
            if isinstance(op, (Fold, While)):
                for carry in carries(op):
                    if not active.isdisjoint((carry.init, carry.yielded)):
                        active.update((*carry.args, carry.result))
            elif not active.isdisjoint(op.uses()):
                active.update(op.results)
    return active


def _keeps_sums(op: Op, active: Collection[Value], defined: Mapping[Value, Op]) -> bool:
    """True if active values stay sums in an op: it is linear in them, stores them, or carries them from 0 on."""
    if isinstance(op, Fold):
        summed = [carry for carry in carries(op) if carry.result in active]
        ends = ((carry.init, carry.yielded) for carry in summed)
        are_sums = all(v in active or is_zero(v, defined) for pair in ends for v in pair)
        return are_sums and not any(v in active for v in op.operands[:2])
    used = [v for v in op.operands if v in active]
    if op.regions:
        return not used and not any(r in active for region in op.regions for r in region.results)
    if isinstance(op, WriteOp):
        adds = isinstance(op, Store) or (isinstance(op, Atomic) and op.kind == "add")
        return not used or (adds and not any(v in active for v in op.operands[2:]))
    return not used or is_linear(op, active)


def _adds_up(fold: Fold, defined: Mapping[Value, Op]) -> bool:
    """True if each carry of a fold is a sum, which the body uses for nothing else."""
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
    """True if the result of an op is linear in its active operands, and 0 if all active operands are 0."""
    is_active = [v in active for v in op.operands]
    match op:
        case Convert():
            return kind_of(op.dtype) == "float"
        case Reduce():
            return op.monoid == "sum"
        case Elementwise(function="neg"):
            return True
        case Elementwise(function="add" | "sub") | Concatenate():
            return all(is_active)
        case Elementwise(function="mul") | Dot():
            return sum(is_active) == 1
        case Elementwise(function="div"):  # of integers it rounds
            return is_active == [True, False] and kind_of(op.result.tile.dtype) == "float"
        case Select():
            return is_active == [False, True, True]
        case _:
            return isinstance(op, _MOVES)
