"""Constants of several elements as inputs of the kernel: Triton has no literal tiles.

c = constant [1 5 2 7]    →    c = load table0[0 +: 4!]      with an input table0: ref<f32[4], in>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilekern.ir.compute import Constant
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Access, Dim, Load, Position
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


@dataclass(frozen=True)
class WithTables:
    """A Func without constants of several elements.

    Attributes:
      func: its inputs are those of the original, then the tables.
      tables: the arrays of the last inputs.
    """

    func: Func
    tables: tuple[Array, ...]


def constants_as_inputs(func: Func) -> WithTables:
    """Apply the rewrite above to a legal Func."""
    tables: dict[Value, Array] = {}

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Constant) or op.array.shape == ():
            return None
        table = Value(RefType(op.shape, op.array.dtype, "in"), f"table{len(tables)}")
        tables[table] = op.array
        dims = tuple(Dim("block", Position(), n, in_bounds=True) for n in op.shape)
        return rewriter.add(Load(operands=(table,), access=Access(dims), loc=op.loc, hint=op.hint))

    body = Rewriter(rule).run(func).body
    count = len(func.inputs)
    params = (*func.params[:count], *tables, *func.params[count:])
    return WithTables(replace(func, params=params, body=body), tuple(tables.values()))
