"""Constant arrays as inputs: the body of a Pallas kernel closes over no array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilekern.ir.compute import Constant
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Access, Dim, Load, Position
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


@dataclass(frozen=True)
class Closed:
    """A Func without constant arrays.

    Attributes:
      func: its last inputs are the constants.
      constants: their values.
    """

    func: Func
    constants: tuple[Array, ...]


def constants_as_inputs(func: Func) -> Closed:
    """constant of several numbers → load of a further input."""
    arrays: list[Array] = []
    params: list[Value] = []

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Constant) or op.array.size == 1 or not op.result.tile.size:
            return None
        arrays.append(op.array.reshape(op.array.shape))
        params.append(Value(RefType(op.array.shape, op.array.dtype, "in"), f"constant{len(params)}"))
        whole = Access(tuple(Dim("block", Position(), n, in_bounds=True) for n in op.array.shape))
        return rewriter.add(Load(operands=(params[-1],), access=whole, loc=op.loc, hint=op.hint))

    func = Rewriter(rule).run(func)
    count = len(func.inputs)
    return Closed(replace(func, params=(*func.params[:count], *params, *func.params[count:])), tuple(arrays))
