"""Rewriting: copy a Func op by op, with a rule that may replace each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilekern.ir.core import Block, Builder, Func, Op, Value


class Rewriter(Builder):
    """Copies blocks; `rule(op, rewriter)` sees each op with its operands already replaced.

    The rule returns None to keep the op, or the values that replace its results (an empty list for an op without
    results), which it may compute with ops it adds to the rewriter. Regions are rewritten before the rule sees the op.
    """

    def __init__(self, rule: Callable[[Op, Rewriter], Sequence[Value] | None]) -> None:
        super().__init__()
        self._rule = rule
        self._replaced: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        """What stands for a value of the original."""
        return self._replaced.get(value, value)

    def run(self, func: Func) -> Func:
        """The rewritten function."""
        return replace(func, body=self.copy_block(func.body))

    def copy_block(self, block: Block) -> Block:
        """The rewritten block, with the same arguments."""

        def body(*_: Value) -> tuple[Value, ...]:
            return self.inline(block)

        return self.block(block.args, body)

    def inline(self, block: Block, args: Sequence[Value] | None = None) -> tuple[Value, ...]:
        """Copy a block's ops to the current place, its arguments replaced by `args`; returns what it yields."""
        if args is not None:
            self._replaced.update(zip(block.args, args, strict=True))
        for op in block.ops:
            self._copy(op)
        return tuple(self.value(v) for v in block.results)

    def _copy(self, op: Op) -> None:
        operands = tuple(self.value(v) for v in op.operands)
        regions = tuple(self.copy_block(r) for r in op.regions)
        unchanged = operands == op.operands and all(
            new.ops == old.ops and new.results == old.results for new, old in zip(regions, op.regions, strict=True)
        )
        current = op if unchanged else op.copy(operands, regions)
        results = self._rule(current, self)
        if results is None:
            results = self.add(current)
        self._replaced.update(zip(op.results, results, strict=True))
