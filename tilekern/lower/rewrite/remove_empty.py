"""Replace ops on tiles without elements, of which no target has vectors.

Needs: a verified Func. Gives: a Func with the same outputs. The ops left on tiles without elements have results without
elements; `dce` removes them unless loops carry them.

    store, atomic of no element       → nothing
    reduce along a dim of size 0      → its identity
    dot of depth 0                    → 0
    pad of no element                 → the fill
    concatenate                       → the concatenation of the operands that have elements
    update by no element              → the tile itself
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern.ir.compute import Dot, Reduce, identity
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.debug import Assert
from tilekern.ir.dynamic import DynamicUpdateSlice
from tilekern.ir.make import Make
from tilekern.ir.memory import WriteOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Concatenate, Pad


def remove_empty(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case WriteOp() if not op.value.tile.size:
            return []
        case Assert() if not op.operands[0].tile.size:
            return []
        case Reduce() if not op.operands[0].tile.size and op.result.tile.size:
            return [make.constant(np.asarray(identity(op.monoid, op.result.tile.dtype)), op.result.tile)]
        case Dot() if not op.operands[0].tile.size and op.result.tile.size:
            return [make.number(0, op.result.tile)]
        case Pad() if not op.operands[0].tile.size and op.result.tile.size:
            return [make.broadcast(op.operands[1], op.result.tile.shape, ())]
        case Concatenate() if op.result.tile.size:
            return [make.joined(op.dim, *op.operands)]
        case DynamicUpdateSlice() if not op.operands[1].tile.size:
            return [op.operands[0]]
        case _:
            return None
