"""Reshape arrays outside of the kernel: blocks in VMEM have the dims of their array, so XLA makes reshaped views.

    x: [6, 4, 128]   load x as [24, 128][i +: 8, :]    →   x: [24, 128]   load x[i +: 8, :]

An input that is viewed in several shapes becomes one input for each shape. An output must be viewed in one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


@record
class ReshapedFunc:
    """A Func whose accesses see each array in its own shape.

    Attributes:
      func: the Func.
      origins: for each of its inputs, the number of the original Func's input that it reshapes.
      notes: the lines of the plan that tell what XLA reshapes.
    """

    func: Func
    origins: tuple[int, ...]
    notes: tuple[str, ...]

    def inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """The inputs of `func`: the arrays of the original Func's inputs, reshaped; one array for each shape."""
        pairs = zip(self.origins, self.func.inputs, strict=True)
        return [arrays[number].reshape(param.ref.shape) for number, param in pairs]


def reshape_arrays(func: Func) -> ReshapedFunc:
    """Reshape the params of a Func instead of the views of its accesses.

    Raises:
      TargetError: an output is viewed in several shapes.
    """
    shapes: dict[Value, dict[tuple[int, ...], MemoryOp]] = {p: {} for p in func.params}
    for op in func.walk():
        if isinstance(op, MemoryOp):
            shapes[op.ref].setdefault(op.extents, op)
    reshaped: dict[tuple[Value, tuple[int, ...]], Value] = {}
    for param, accesses in shapes.items():
        if len(accesses) > 1 and param.ref.role != "in":
            raise _several(param, accesses)
        for shape in accesses or (param.ref.shape,):
            same = shape == param.ref.shape
            reshaped[param, shape] = (
                param if same else Value(RefType(shape, param.ref.dtype, param.ref.role), param.name)
            )
    origins = tuple(func.inputs.index(param) for param, _ in reshaped if param in func.inputs)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, MemoryOp) or op.access.extents is None:
            return None
        ref = reshaped[op.ref, op.extents]
        return rewriter.add(replace(op, operands=(ref, *op.operands[1:]), access=replace(op.access, extents=None)))

    moved = [(param, shape) for param, shape in reshaped if shape != param.ref.shape]
    notes = tuple(f"  {param.name}{list(param.ref.shape)} as {list(shape)}" for param, shape in moved)
    seen = replace(Rewriter(rule).run(func), params=tuple(reshaped.values()))
    return ReshapedFunc(seen, origins, ("reshaped by XLA", *notes) if notes else ())


def _several(param: Value, accesses: dict[tuple[int, ...], MemoryOp]) -> TargetError:
    """The error for an output that is accessed in several shapes, with an access for each shape."""
    with source.at(list(accesses.values())[1].loc):
        return TargetError(
            f"the kernel sees {param.name} in several shapes, and writes to it",
            expected="one shape for all loads and stores of an array that is written: its blocks in VMEM have its dims",
            got=f"{param.name}: {param.ref}, seen as {' and '.join(str(list(shape)) for shape in accesses)}",
            fix="use one reshape for all of them, or reshape the stored tile instead",
        )
