"""Comparison of two traces of one body, for whole arrays and for parts: all but their sizes must be the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access
from tilekern.ir.shape import Broadcast, Reshape

_SKIPPED = ("operands", "regions", "results", "loc", "hint")


def difference(whole: Func, part: Func, sizes: Collection[tuple[int, int]]) -> str:
    """The first thing in which two traces differ, in words; "" if they compute the same function of their arrays.

    Args:
      whole: for whole arrays.
      part: with the same blocks, for parts.
      sizes: the sizes that differ, (whole, part). Only extents may be these: of axes, of arrays, of comparisons with
        positions, of loops.
    """
    return _Comparison(whole, part, sizes).run()


class _Different(Exception):
    """Two traces differ; the message says in what."""


class _Comparison:
    def __init__(self, whole: Func, part: Func, sizes: Collection[tuple[int, int]]) -> None:
        self._whole, self._part, self._sizes = whole, part, sizes
        self._same: dict[Value, Value] = {}
        self._users: dict[Value, list[Op]] = {}
        for op in whole.walk():
            for value in op.operands:
                self._users.setdefault(value, []).append(op)

    def run(self) -> str:
        try:
            self._require(len(self._whole.params) == len(self._part.params), "the number of arrays")
            for a, b in zip(self._whole.params, self._part.params, strict=True):
                self._require((a.ref.dtype, a.ref.role) == (b.ref.dtype, b.ref.role), f"the type of {a.name}")
                self._same[a] = b
            self._axes(self._whole.axes, self._part.axes)
            self._block(self._whole.body, self._part.body)
        except _Different as different:
            return str(different)
        return ""

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise _Different(what)

    def _is_size(self, a: Any, b: Any) -> bool:
        return a == b or (a, b) in self._sizes

    def _axes(self, some: Sequence[Axis], others: Sequence[Axis]) -> None:
        self._require(len(some) == len(others), "the number of axes of the grid")
        for a, b in zip(some, others, strict=True):
            self._axis(a, b)

    def _axis(self, a: Axis, b: Axis) -> None:
        self._require(a.block == b.block and self._is_size(a.extent, b.extent), f"the tiles of axis {a.name}")

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
        elif isinstance(a, Access) and isinstance(b, Access):
            self._require(a.dims == b.dims, f"the positions of a {op.name}")
            pairs = zip(a.extents or (), b.extents or (), strict=True)
            self._require(all(self._is_size(n, m) for n, m in pairs), "the shape of a view")
        else:
            self._require(bool(a == b), f"an attribute of {op.name}")

    def _constant(self, a: Constant, b: Constant) -> None:
        same = a.array.shape == b.array.shape and a.array.dtype == b.array.dtype and a.shape == b.shape
        if same and a.array.tobytes() == b.array.tobytes():
            return
        is_extent = same and a.array.shape == () and (int(a.array), int(b.array)) in self._sizes
        self._require(
            is_extent and self._bounds_only(a.result),
            f"a number that it computes with: {a.array} for all, {b.array} for a part",
        )

    def _bounds_only(self, value: Value) -> bool:
        """True if a number is for bounds of loops and for `position < number` alone."""
        users = self._users.get(value, [])
        return all(
            self._bounds_only(op.result) if isinstance(op, (Broadcast, Reshape)) else _bounds(op, value) for op in users
        )


def _bounds(op: Op, value: Value) -> bool:
    if isinstance(op, Fold):
        return value is op.stop and op.operands.count(value) == 1
    return (
        isinstance(op, Elementwise) and op.function == "lt" and op.operands[1] is value and op.operands[0] is not value
    )
