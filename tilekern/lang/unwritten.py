"""Check that a program stores to a plain output before it loads from it, while the kernel is traced.

A plain output has no value before a program stores to it, but `out[i] += x[i]` loads first. The check looks at arrays,
not at elements: a load after any store to the output, in the same program, passes. `tk.interpret` checks each element.

In a loop that stores to the output, a load before the store may read the value of an earlier iteration. Such a load is
refused only if it surely reads in the first iteration: under no condition, without a mask, inside of the array.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from tilekern import source
from tilekern.errors import OutputError
from tilekern.ir.analysis.ranges import FALSE, Interval, analyze, fold_runs, position_interval
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Dim, Load, WriteOp
from tilekern.ir.records import record

_NONE: frozenset[Value] = frozenset()


def check_loads(func: Func) -> None:
    """Raise `OutputError` for a load of a plain output that no store can precede."""
    outputs = {p for p in func.outputs if p.ref.role == "out"}
    if any(isinstance(op, Load) and op.ref in outputs for op in func.walk()):
        loads = {op for op in live_ops(func) if isinstance(op, Load) and op.ref in outputs}
        _Check(loads, analyze(func)).block(func.body, _Before(_NONE, _NONE, _NONE))


def live_ops(func: Func) -> set[Op]:
    """Ops with an effect, and ops whose results are used. A load for its shape only is dead."""
    ops = [*func.walk()]
    used = {v for op in ops for region in op.regions for v in region.results}
    live: set[Op] = set()
    for op in reversed(ops):
        if not (op.pure or isinstance(op, Load)) or not used.isdisjoint(op.results):
            live.add(op)
            used.update(op.operands)
    return live


@record
class _Before:
    """Outputs that may be stored before an op runs.

    Attributes:
      stored: outputs with a store before the op, in program order.
      looped: outputs with a store in a loop around the op.
      perhaps: outputs in `looped` that may have a value whenever the op runs, as it may not run in the first iteration.
    """

    stored: frozenset[Value]
    looped: frozenset[Value]
    perhaps: frozenset[Value]

    def conditional(self) -> _Before:
        """The state inside of a region that may not run in a first iteration: outputs in `looped` may have values."""
        return replace(self, perhaps=self.perhaps | self.looped)


class _Check:
    """Walk through a Func in program order that checks `loads`."""

    def __init__(self, loads: Set[Op], ranges: Mapping[Value, Interval]) -> None:
        self._loads, self._ranges = loads, ranges

    def block(self, block: Block, before: _Before) -> frozenset[Value]:
        """Check the loads of a block; returns the outputs that may be stored after it."""
        for op in block.ops:
            before = replace(before, stored=before.stored | self._op(op, before))
        return before.stored

    def _op(self, op: Op, before: _Before) -> frozenset[Value]:
        """Check an op; returns the outputs that it may store."""
        match op:
            case Load():
                has_value = op not in self._loads or op.ref in before.stored | before.perhaps
                if not has_value and self._reads(op, op.ref in before.looped):
                    raise _unwritten(op)
                return _NONE
            case Fold() | While():
                return self._loop(op, before)
            case Switch():
                inside = before if isinstance(op, Hoist) else before.conditional()
                return frozenset[Value]().union(*(self.block(region, inside) for region in op.regions))
            case WriteOp():
                return frozenset([op.ref])
            case _:
                return _NONE

    def _loop(self, op: Fold | While, before: _Before) -> frozenset[Value]:
        stores = frozenset(inner.ref for r in op.regions for inner in r.walk() if isinstance(inner, WriteOp))
        runs = isinstance(op, Fold) and fold_runs(op, self._ranges)
        inside = before if runs else before.conditional()
        inside = replace(inside, looped=inside.looped | stores)
        for region in op.regions:  # a while's condition, then its body
            inside = replace(inside, stored=self.block(region, inside))
        return stores

    def _reads(self, op: Load, looped: bool) -> bool:
        """True if a load surely reads an element. Outside of loops with stores, a mask is assumed to hold somewhere."""
        if op.mask is not None and (looped or self._ranges.get(op.mask) == FALSE):
            return False
        return all(self._inside(op, dim, size) for dim, size in zip(op.access.dims, op.extents, strict=True))

    def _inside(self, op: Load, dim: Dim, size: int) -> bool:
        """True if at least one lane of a dim is surely inside an array of `size` elements."""
        first_lane = position_interval(dim.position, [self._ranges.get(v) for v in op.positions])
        if first_lane is None or not dim.size or not size:
            return False
        lanes = dim.size if dim.kind == "block" else 1
        return first_lane.low > -lanes and first_lane.high < size


def _unwritten(op: Load) -> OutputError:
    with source.at(op.loc):
        return OutputError(
            f"{op.ref.name} is loaded before anything is stored to it",
            expected="a store by the same program before: a plain output has no value at first",
            got=f"a load of {op.ref.name}: {op.ref.ref}",
            fix="to add to an array, make it an input that donate= names; to start at 0, declare the output as "
            "tk.Zeros(...); to sum over programs, as tk.Sum(...) with .at[...].add; to sum in a loop, carry the sum",
        )
