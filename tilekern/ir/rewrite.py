"""Copying a Func with a rule that may replace each op."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilekern.ir.core import Block, Builder, Func, Op, Value


class Rewriter(Builder):
    """Copies blocks; `rule(op, rewriter)` sees each op with its operands already replaced.

    The rule returns None to keep the op, or the values that replace its results (an empty list for an op without
    results), which it may compute with ops it adds to the rewriter. Regions are rewritten before the rule sees the op.
    Ops that no rule replaces are not copied: a Func without a match is returned itself.
    """

    def __init__(self, rule: Callable[[Op, Rewriter], Sequence[Value] | None]) -> None:
        super().__init__()
        self._rule = rule
        self._replaced: dict[Value, Value] = {}
        self._definitions: dict[Value, Op] = {}

    def value(self, value: Value) -> Value:
        """The value that replaces a value of the original."""
        return self._replaced.get(value, value)

    def definition(self, value: Value) -> Op | None:
        """The op of the rewritten function that defines a value; block arguments and params have none."""
        return self._definitions.get(value)

    def replace(self, value: Value, by: Value) -> None:
        """From here on, `by` stands for a value of the original."""
        self._replaced[value] = by

    def run(self, func: Func) -> Func:
        """The rewritten function."""
        body = self.copy_block(func.body)
        return func if body is func.body else replace(func, body=body)

    def add(self, op: Op) -> tuple[Value, ...]:
        for result in op.results:
            self._definitions[result] = op
        return super().add(op)

    def one(self, op: Op) -> Value:
        (value,) = self.add(op)
        return value

    def copy_block(self, block: Block) -> Block:
        """The rewritten block, with the same arguments."""

        def body(*_: Value) -> tuple[Value, ...]:
            return self.inline(block)

        copy = self.block(block.args, body)
        return block if (copy.ops, copy.results) == (block.ops, block.results) else copy

    def inline(self, block: Block, args: Sequence[Value] | None = None) -> tuple[Value, ...]:
        """Copy a block's ops to the current place, its arguments replaced by `args`; returns the yielded values."""
        if args is not None:
            self._replaced.update(zip(block.args, args, strict=True))
        for op in block.ops:
            self.visit(op)
        return tuple(self.value(v) for v in block.results)

    def visit(self, op: Op) -> Sequence[Value]:
        """Rewrite an op, of the original or made by a rule, at the current place; returns the values of its results.

        A rule that makes an op to which rules apply in turn visits it instead of adding it.
        """
        operands = tuple([self._replaced.get(v, v) for v in op.operands])
        regions = tuple([self.copy_block(r) for r in op.regions])
        current = op if (operands, regions) == (op.operands, op.regions) else op.copy(operands, regions)
        results = self._rule(current, self)
        if results is None:
            results = self.add(current)
        self._replaced.update(zip(op.results, results, strict=True))
        return results


class ScopedRewriter[K](Rewriter):
    """A rewriter that notes values by a key in `known`; the notes of a block are dropped at its end."""

    def __init__(self, rule: Callable[[Op, Rewriter], Sequence[Value] | None]) -> None:
        super().__init__(rule)
        self.known: ChainMap[K, Sequence[Value]] = ChainMap()

    def copy_block(self, block: Block) -> Block:
        self.known = self.known.new_child()
        try:
            return super().copy_block(block)
        finally:
            self.known = self.known.parents


class Cloner(Rewriter):
    """Copies blocks with fresh arguments and results throughout, so that one block can stand at several places."""

    def __init__(self) -> None:
        super().__init__(lambda op, rewriter: rewriter.add(op.copy()))

    def copy_block(self, block: Block) -> Block:
        args = tuple(Value(a.type, a.name) for a in block.args)
        return self.block(args, lambda *_: self.inline(block, args))
