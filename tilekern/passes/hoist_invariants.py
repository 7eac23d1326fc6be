"""Loop-invariant code motion: compute before a loop the ops that are the same in each iteration.

Needs: a verified Func. Gives: in no body of a fold, nor in a region of a while, stands an op that could move out.

    fold k { a = f(x); ... }                      → a = f(x); fold k { ... }            f pure, x from outside
    fold k { a = load x[p]; ... }, x an input     → a = load x[p]; fold k { ... }       p from outside

It is safe even where the loop never runs: pure ops do not trap, lanes of a load out of bounds read the fill, and a dim
is proved in bounds by the intervals of its operands, which hold before the loop, too. Ops in the branches of a switch
stay: moved, they would run where their branch does not.

Constants, iotas and broadcasts cost less to compute again than to keep. They move only if an op that moves needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.control import Fold, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Rewriter


def hoist_invariants(func: Func) -> Func:
    """Apply the rewrites above, out of all loops around an op."""
    return Rewriter(_hoist).run(func)


def _hoist(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, (Fold, While)):
        return None
    movable = [_movable(region) for region in op.regions]
    if not any(movable):
        return None
    regions: list[Block] = []
    for region, moving_ops in zip(op.regions, movable, strict=True):
        for inner in moving_ops:
            rewriter.add(inner)
        moved = set(moving_ops)
        regions.append(Block(region.args, tuple(o for o in region.ops if o not in moved), region.results))
    return rewriter.add(op.copy(regions=tuple(regions)))


def _movable(region: Block) -> list[Op]:
    """The ops of a loop's region that move before the loop, in order."""
    inside = set(region.args)
    invariant: list[Op] = []
    for op in region.ops:
        reads_input = isinstance(op, Load) and op.ref.ref.role == "in"
        if op.regions or not (op.pure or reads_input) or not inside.isdisjoint(op.operands):
            inside.update(op.results)
        else:
            invariant.append(op)
    movable: list[Op] = []
    needed: set[Value] = set()
    for op in reversed(invariant):
        if not _only_enlarges(op) or not needed.isdisjoint(op.results):
            movable.append(op)
            needed.update(op.operands)
    return movable[::-1]


def _only_enlarges(op: Op) -> bool:
    if isinstance(op, Load):
        return False
    return max(v.tile.size for v in op.results) > max((v.tile.size for v in op.operands), default=0)
