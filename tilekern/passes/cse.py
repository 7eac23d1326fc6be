"""Common subexpression elimination: replace an op by an equal op before it.

Needs: a verified Func. Gives: no two equal ops in one block, or in a block and a block around it.

    a = f(x);  b = f(x)                           → a = f(x), and a for b
    a = load x[p];  b = load x[p], x an input     → a = load x[p], and a for b

Ops are equal if their class, their attributes (constants: bit by bit) and their operands are. Inputs are never
written, so a load from an input counts as pure; loads from outputs stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, cast

import numpy as np

from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Rewriter, ScopedRewriter


def cse(func: Func) -> Func:
    """Apply the rewrites above."""
    return _Merger().run(func)


class _Merger(ScopedRewriter[Hashable]):
    def __init__(self) -> None:
        super().__init__(self._merge)

    def _merge(self, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if op.regions or not (op.pure or (isinstance(op, Load) and op.ref.ref.role == "in")):
            return None
        key = (type(op), op.operands, *(_hashable(getattr(op, name)) for name in _attributes(type(op))))
        earlier_results = self.known.get(key)
        if earlier_results is None:
            self.known[key] = op.results
        return earlier_results


@cache
def _attributes(kind: type[Op]) -> tuple[str, ...]:
    """The names of the fields that, with the operands, define the results of an op of this class."""
    return tuple(f.name for f in fields(kind) if f.name not in ("operands", "regions", "hint", "loc", "results"))


def _hashable(attribute: Any) -> Hashable:
    if not isinstance(attribute, np.ndarray):
        return attribute
    array = cast(Array, attribute)
    return array.dtype, array.shape, array.tobytes()
