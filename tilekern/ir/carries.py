"""The carries of loops, and loops with fewer carries."""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.control import Fold, While
from tilekern.ir.core import Block, Value
from tilekern.ir.records import record


@record
class Carry:
    """One carry of a loop: initial value, argument of each region, value that the body yields, result."""

    init: Value
    args: tuple[Value, ...]
    yielded: Value
    result: Value


def carries(op: Fold | While) -> list[Carry]:
    """The carries of a loop, in order."""
    inits = op.inits if isinstance(op, Fold) else op.operands
    args = zip(*(region.args[_indices(op) :] for region in op.regions), strict=True)
    return [Carry(*c) for c in zip(inits, args, op.regions[-1].results, op.results, strict=True)]


def with_carries(op: Fold | While, selected: Sequence[Carry]) -> Fold | While:
    """The loop with the selected carries only; its regions may still use the arguments of the other carries."""
    bounds = op.operands[: len(op.operands) - len(op.results)]
    regions = [
        Block((*region.args[: _indices(op)], *(c.args[i] for c in selected)), region.ops, region.results)
        for i, region in enumerate(op.regions)
    ]
    regions[-1] = Block(regions[-1].args, regions[-1].ops, tuple(c.yielded for c in selected))
    return op.copy((*bounds, *(c.init for c in selected)), tuple(regions))


def _indices(op: Fold | While) -> int:
    """The number of region arguments before the carries."""
    return 1 if isinstance(op, Fold) else 0
