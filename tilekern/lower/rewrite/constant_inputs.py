"""Constants of several elements as inputs: Triton has no literal tiles, and a Pallas kernel closes over no array.

c = constant [1 5 2 7]    →    c = load table0[0 +: 4!]      with an input table0: ref<f32[4], in>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern.ir.compute import Constant
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Load, whole_access
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


@record
class Closed:
    """A Func without constants of several elements.

    Attributes:
      func: its inputs are the original's inputs, then the constants.
      constants: the arrays of the last inputs.
    """

    func: Func
    constants: tuple[Array, ...]


def constants_as_inputs(func: Func, name: str) -> Closed:
    """Apply the rewrite above to a legal Func; the new inputs are called `name` and a number."""
    constants: dict[Value, Array] = {}

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, Constant) or op.array.shape == () or not op.array.size:
            return None
        param = Value(RefType(op.shape, op.array.dtype, "in"), f"{name}{len(constants)}")
        constants[param] = op.array
        return rewriter.add(Load(operands=(param,), access=whole_access(op.shape), loc=op.loc, hint=op.hint))

    body = Rewriter(rule).run(func).body
    count = len(func.inputs)
    params = (*func.params[:count], *constants, *func.params[count:])
    return Closed(replace(func, params=params, body=body), tuple(constants.values()))
