"""The Func that a device runs where a mesh divides a kernel: the same ops, on a part of the grid and of the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.analysis.sharding import Factor
from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


def divide(func: Func, parts: Mapping[Factor, int]) -> Func:
    """The Func of one part, where each factor is divided into a number of equal parts.

        func @f(%x: ref<f32[16, 8], in>, %o: ref<f32[16, 8], out>) { grid %i in i[16 by 4]   load %x[4*%i +: 4, ...] }
      → {i: 2}
        func @f(%x: ref<f32[8, 8], in>, %o: ref<f32[8, 8], out>) { grid %i in i[8 by 4]   load %x[4*%i +: 4, ...] }

    Only extents change: of axes, of dims of arrays, and in the constants that stand for the extent of an axis. All
    other numbers stay as in the whole, so an op that computes with a size does the same on each device as on one.

    Args:
      func: the Func as it was traced.
      parts: for factors of `sharding_of(func)`, the number of parts, which divides each size of the factor.
    """
    return _Divide(func, parts).run()


class _Divide:
    def __init__(self, func: Func, parts: Mapping[Factor, int]) -> None:
        assert all(size % count == 0 for factor, count in parts.items() for size in factor.sizes), parts
        self._func = func
        self._of_index = {index: count for factor, count in parts.items() for index in factor.indices}
        self._of_constant = {op: count for factor, count in parts.items() for op in factor.extents}
        places = {place: count for factor, count in parts.items() for place in factor.dims}
        self._params = {
            param: tuple(places.get((number, n), 1) for n in range(len(param.ref.shape)))
            for number, param in enumerate(func.params)
        }
        self._parts = {p: self._part(p, counts) if prod(counts) > 1 else p for p, counts in self._params.items()}

    def run(self) -> Func:
        """The Func of one part."""
        axes = [self._axis(axis, index) for axis, index in zip(self._func.axes, self._func.body.args, strict=True)]
        body = Rewriter(self._rule).run(self._func).body
        return replace(self._func, params=tuple(self._parts.values()), axes=tuple(axes), body=body)

    def _part(self, param: Value, counts: Sequence[int]) -> Value:
        shape = tuple(n // count for n, count in zip(param.ref.shape, counts, strict=True))
        return Value(RefType(shape, param.ref.dtype, param.ref.role), param.name)

    def _axis(self, axis: Axis, index: Value) -> Axis:
        count = self._of_index.get(index, 1)
        return axis if count == 1 else replace(axis, extent=axis.extent // count)

    def _rule(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        match op:
            case Constant() if op in self._of_constant:
                extent = np.asarray(op.array // self._of_constant[op], op.array.dtype)
                return rewriter.add(replace(op, array=extent))
            case Fold():
                return rewriter.add(replace(op, axis=self._axis(op.axis, op.body.args[0])))
            case MemoryOp():
                return rewriter.add(self._access(op))
            case _:
                return None

    def _access(self, op: MemoryOp) -> MemoryOp:
        counts, extents = self._params[op.ref], op.access.extents
        if extents is not None:  # a view does not reshape the divided dims, which come first
            divided = [n // count for n, count in zip(extents, counts, strict=False)]
            extents = (*divided, *extents[len(divided) :])
        access = replace(op.access, extents=extents)
        return replace(op, operands=(self._parts[op.ref], *op.operands[1:]), access=access)
