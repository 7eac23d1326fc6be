"""Merge of additions to the same elements: a program adds the sum of the addends of several sites at once.

    fold k { %a = f(k)   atomic add %a to %x[k] }   fold k { %b = g(k)   atomic add %b to %x[k] }
  →
    fold k { ... }   fold k { %b = g(k)   %a = f(k)   %s = add(%a, %b)   atomic add %s to %x[k] }

All other ops of the first fold stay. A kernel that reads its rows twice, as norms do, so has a backward pass that
writes each cotangent once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.analysis.sites import Site, sites
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Atomic, MemoryOp, WriteOp
from tilekern.ir.rewrite import Rewriter
from tilekern.passes import pipeline


def merge(func: Func) -> Func:
    """Merge the additions that can be merged."""
    while True:
        additions = sites(func)
        pairs = ((a, b) for b in range(len(additions)) for a in range(b) if _fits(additions[a], additions[b]))
        pair = next(pairs, None)
        if pair is None:
            return func
        func = pipeline.run(_merged(func, additions, *pair))


def _fits(first: Site, second: Site) -> bool:
    """True if two sites add to the same elements, in one block, or in two folds of one block over the same tiles."""
    if first.op.ref is not second.op.ref or len(first.path) != len(second.path):
        return False
    if not _same_access(first.op, second.op, _renamed(first, second)):
        return False
    if first.path == second.path:
        return True
    (early, _), (late, _) = first.path[-1], second.path[-1]
    if first.path[:-1] != second.path[:-1] or not (isinstance(early, Fold) and isinstance(late, Fold)):
        return False
    if early is late or (early.axis, early.start, early.stop) != (late.axis, late.start, late.stop):
        return False
    slice = _slice(first)
    carried = set(early.body.args[1:])
    return not any(op.regions or not carried.isdisjoint(op.operands) for op in slice) and _is_repeatable(slice)


def _is_repeatable(ops: Sequence[Op]) -> bool:
    return all(op.pure or (isinstance(op, MemoryOp) and op.ref.ref.role == "in") for op in ops)


def _slice(site: Site) -> list[Op]:
    """The ops of the site's block that its value and its mask depend on."""
    _, block = site.path[-1]
    mask = site.op.mask
    return backward_slice(block.ops, (site.op.value, *(() if mask is None else (mask,))))


def _renamed(first: Site, second: Site) -> dict[Value, Value]:
    """Maps the index of the first site's fold to the index of the second site's fold; empty in one fold."""
    if first.path == second.path:
        return {}
    (early, _), (late, _) = first.path[-1], second.path[-1]
    if not (isinstance(early, Fold) and isinstance(late, Fold)):
        return {}
    return {early.body.args[0]: late.body.args[0]}


def _same_access(early: WriteOp, late: WriteOp, renamed: dict[Value, Value]) -> bool:
    lanes = (a.access.marked([False] * len(a.access.dims)) for a in (early, late))
    return next(lanes) == next(lanes) and tuple(renamed.get(v, v) for v in early.positions) == late.positions


def _merged(func: Func, additions: Sequence[Site], first: int, second: int) -> Func:
    """The Func in which site number `second` also adds the value of site number `first`."""
    early, late = additions[first], additions[second]
    renamed = _renamed(early, late)
    slice = _slice(early) if early.path != late.path else []
    numbers = iter(range(len(additions)))

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Atomic):
            return None
        number = next(numbers)
        if number != second:
            return [] if number == first else None
        copies = dict(renamed)

        def copy(value: Value) -> Value:
            return rewriter.value(copies.get(value, value))

        for inner in slice:
            results = rewriter.add(inner.copy(tuple(map(copy, inner.operands))))
            copies.update(zip(inner.results, results, strict=True))
        make = Make(rewriter, op)
        early_value = _masked(copy(early.op.value), None if early.op.mask is None else copy(early.op.mask), make)
        total = make.of("add", early_value, _masked(op.value, op.mask, make))
        operands = (op.operands[0], total, *op.positions)
        return rewriter.add(Atomic(operands=operands, access=op.access, kind="add", loc=op.loc))

    return Rewriter(rule).run(func)


def _masked(value: Value, mask: Value | None, make: Make) -> Value:
    return value if mask is None else make.select(mask, value, 0)
