"""Comparison of two Funcs, op by op: they compute the same function if no op differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tilekern.ir.compute import Constant
from tilekern.ir.core import Axis, Block, Func, Op, Value

_SKIPPED = ("operands", "regions", "results", "loc", "hint")


def difference(whole: Func, part: Func) -> str:
    """The first difference between the Func of a whole and the Func of a part, in words; "" if all ops are equal.

    Names of values and axes, and lines of the user's program, are not compared.
    """
    return _Comparison(whole, part).run()


class _DifferentError(Exception):
    """Two Funcs differ; the message names the difference."""


class _Comparison:
    def __init__(self, whole: Func, part: Func) -> None:
        self._whole, self._part = whole, part
        self._counterparts: dict[Value, Value] = {}

    def run(self) -> str:
        try:
            self._require(len(self._whole.params) == len(self._part.params), "the number of arrays")
            for a, b in zip(self._whole.params, self._part.params, strict=True):
                self._require(a.ref == b.ref, f"the type of {a.name}")
                self._counterparts[a] = b
            self._axes(self._whole.axes, self._part.axes)
            self._block(self._whole.body, self._part.body)
        except _DifferentError as different:
            return str(different)
        return ""

    def _require(self, condition: bool, feature: str) -> None:
        if not condition:
            raise _DifferentError(feature)

    def _axes(self, whole: Sequence[Axis], part: Sequence[Axis]) -> None:
        self._require(len(whole) == len(part), "the number of axes of the grid")
        for a, b in zip(whole, part, strict=True):
            self._axis(a, b)

    def _axis(self, a: Axis, b: Axis) -> None:
        self._require((a.block, a.extent) == (b.block, b.extent), f"the tiles of axis {a.name}")

    def _block(self, a: Block, b: Block) -> None:
        self._require(len(a.args) == len(b.args) and len(a.ops) == len(b.ops), "the number of operations")
        self._counterparts.update(zip(a.args, b.args, strict=True))
        for x, y in zip(a.ops, b.ops, strict=True):
            self._op(x, y)
        self._values(a.results, b.results, "what a loop carries")

    def _values(self, whole: Sequence[Value], part: Sequence[Value], feature: str) -> None:
        self._require([self._counterparts.get(v) for v in whole] == [*part], feature)

    def _op(self, a: Op, b: Op) -> None:
        self._require(type(a) is type(b) and len(a.results) == len(b.results), f"{a.name} where a part has {b.name}")
        self._values(a.operands, b.operands, f"the operands of {a.name}")
        if isinstance(a, Constant) and isinstance(b, Constant):
            self._constant(a, b)
        else:
            for field in fields(a):
                if field.name not in _SKIPPED:
                    self._field(a, getattr(a, field.name), getattr(b, field.name))
        for a_region, b_region in zip(a.regions, b.regions, strict=True):
            self._block(a_region, b_region)
        self._require([r.type for r in a.results] == [r.type for r in b.results], f"the result of {a.name}")
        self._counterparts.update(zip(a.results, b.results, strict=True))

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
