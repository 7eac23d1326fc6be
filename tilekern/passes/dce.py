"""Dead code elimination: remove ops, carries and results that no store depends on.

Needs: a verified Func. Gives: a store, or the bounds of a loop around a store, depends on every op that is left.

    a = f(x), a load, a fold, a while, a switch; no result used, nothing stored inside → nothing
    fold or while with a carry that only the carry itself depends on → the loop without it
    switch with a result that is not used                            → the switch without it

A `while` without a used result goes, even if it would never end.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.carries import carries, with_carries
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Rewriter


def dce(func: Func) -> Func:
    """Apply the rewrites above."""
    return _Remover(_Liveness(func)).run(func)


class _Liveness:
    """The ops and values that a store depends on, found from the stores backwards."""

    def __init__(self, func: Func) -> None:
        self.ops: set[Op] = set()
        self.values: set[Value] = set()
        self._sources: dict[
            Value, list[Value]
        ] = {}  # a loop's carry or a switch's result → the values that it may equal
        self._owners: dict[Value, Op] = {}
        self._parents: dict[Op, Op] = {}
        self._pending: list[Value] = []
        self._enter(func.body)
        for op in func.walk():
            if not (op.pure or isinstance(op, (Load, Fold, While, Switch))):
                self._use_op(op)
        while self._pending:
            self._use_value(self._pending.pop())

    def _enter(self, block: Block, parent: Op | None = None) -> None:
        for op in block.ops:
            if parent is not None:
                self._parents[op] = parent
            self._owners.update(dict.fromkeys(op.results, op))
            if isinstance(op, Switch):
                yielded = zip(*(region.results for region in op.regions), strict=True)
                self._sources.update({r: list(values) for r, values in zip(op.results, yielded, strict=True)})
            elif isinstance(op, (Fold, While)):
                for c in carries(op):
                    # An argument depends on the result, so that either both are live or neither is.
                    self._sources[c.result] = [c.init, c.yielded, *c.args]
                    self._sources.update({arg: [c.result] for arg in c.args})
            for region in op.regions:
                self._enter(region, op)

    def _use_value(self, value: Value) -> None:
        if value in self.values:
            return
        self.values.add(value)
        self._pending += self._sources.get(value, ())
        if value in self._owners:
            self._use_op(self._owners[value])

    def _use_op(self, op: Op) -> None:
        if op in self.ops:
            return
        self.ops.add(op)
        if op in self._parents:
            self._use_op(self._parents[op])
        if isinstance(op, Fold):
            self._pending += (op.start, op.stop)
        elif isinstance(op, While):
            self._pending += op.condition.results
        else:
            self._pending += op.operands


class _Remover(Rewriter):
    """Leaves out the ops, carries and results that are not live."""

    def __init__(self, live: _Liveness) -> None:
        super().__init__(lambda op, rewriter: None)
        self._live = live

    def visit(self, op: Op) -> Sequence[Value]:
        if op not in self._live.ops:
            return op.results
        live = [r in self._live.values for r in op.results]
        if all(live) or not isinstance(op, (Fold, While, Switch)):
            return super().visit(op)
        live_results = iter(super().visit(_with_results(op, live)))
        for result, used in zip(op.results, live, strict=True):
            if used:
                self.replace(result, next(live_results))
        return [self.value(r) for r in op.results]


def _with_results(op: Fold | While | Switch, live: Sequence[bool]) -> Op:
    """A control op with only its live results."""
    if isinstance(op, Switch):
        regions = (Block(r.args, r.ops, _live(r.results, live)) for r in op.regions)
        return op.copy(regions=tuple(regions))
    return with_carries(op, _live(carries(op), live))


def _live[T](items: Sequence[T], live: Sequence[bool]) -> tuple[T, ...]:
    return tuple(item for item, used in zip(items, live, strict=True) if used)
