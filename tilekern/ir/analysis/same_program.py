"""Comparison of two Funcs, op by op: they compute the same function if nothing differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tilekern.ir.compute import Constant
from tilekern.ir.core import Axis, Block, Func, Op, Value

_SKIPPED = ("operands", "regions", "results", "loc", "hint")


def difference(wanted: Func, found: Func) -> str:
    """The first difference between two Funcs, in words; "" if they compute the same, op by op.

    Names of values and of axes count as nothing, nor do lines of the user's program.
    """
    return _Comparison(wanted, found).run()


class _DifferentError(Exception):
    """Two Funcs differ; the message says in what."""


class _Comparison:
    def __init__(self, wanted: Func, found: Func) -> None:
        self._wanted, self._found = wanted, found
        self._same: dict[Value, Value] = {}

    def run(self) -> str:
        try:
            self._require(len(self._wanted.params) == len(self._found.params), "the number of arrays")
            for a, b in zip(self._wanted.params, self._found.params, strict=True):
                self._require(a.ref == b.ref, f"the type of {a.name}")
                self._same[a] = b
            self._axes(self._wanted.axes, self._found.axes)
            self._block(self._wanted.body, self._found.body)
        except _DifferentError as different:
            return str(different)
        return ""

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise _DifferentError(what)

    def _axes(self, some: Sequence[Axis], others: Sequence[Axis]) -> None:
        self._require(len(some) == len(others), "the number of axes of the grid")
        for a, b in zip(some, others, strict=True):
            self._axis(a, b)

    def _axis(self, a: Axis, b: Axis) -> None:
        self._require((a.block, a.extent) == (b.block, b.extent), f"the tiles of axis {a.name}")

    def _block(self, a: Block, b: Block) -> None:
        self._require(len(a.args) == len(b.args) and len(a.ops) == len(b.ops), "the number of operations")
        self._same.update(zip(a.args, b.args, strict=True))
        for x, y in zip(a.ops, b.ops, strict=True):
            self._op(x, y)
        self._values(a.results, b.results, "what a loop carries")

    def _values(self, some: Sequence[Value], others: Sequence[Value], what: str) -> None:
        self._require([self._same.get(v) for v in some] == [*others], what)

    def _op(self, a: Op, b: Op) -> None:
        self._require(type(a) is type(b) and len(a.results) == len(b.results), f"{a.name} where a part has {b.name}")
        self._values(a.operands, b.operands, f"the operands of {a.name}")
        if isinstance(a, Constant) and isinstance(b, Constant):
            self._constant(a, b)
        else:
            for field in fields(a):
                if field.name not in _SKIPPED:
                    self._field(a, getattr(a, field.name), getattr(b, field.name))
        for region, other in zip(a.regions, b.regions, strict=True):
            self._block(region, other)
        self._require([r.type for r in a.results] == [r.type for r in b.results], f"the result of {a.name}")
        self._same.update(zip(a.results, b.results, strict=True))

    def _field(self, op: Op, a: Any, b: Any) -> None:
        if isinstance(a, Axis) and isinstance(b, Axis):
            self._axis(a, b)
        elif isinstance(a, Block) and isinstance(b, Block):
            self._block(a, b)
        else:
            self._require(bool(a == b), f"an attribute of {op.name}")

    def _constant(self, a: Constant, b: Constant) -> None:
        same = a.array.shape == b.array.shape and a.array.dtype == b.array.dtype and a.shape == b.shape
        self._require(
            same and a.array.tobytes() == b.array.tobytes(),
            f"a number that it computes with: {a.array} for all, {b.array} for a part",
        )
