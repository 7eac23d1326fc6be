"""Functions of bools in terms of `and`, `or`, `xor` and `not`, or of integers."""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.core import Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make

_LOGICAL = {"max": "or", "min": "and", "ne": "xor"}


def expand_logical(make: Make, op: Elementwise, number: Callable[[Value], Value]) -> Value | None:
    """The result of an elementwise op on bools; None if the op stays as it is.

    Args:
      make: adds ops.
      op: the op.
      number: converts a bool to 0 or 1 as int32, for comparisons by order.
    """
    if op.function in ("and", "or", "xor", "not"):
        return None
    if op.function in _LOGICAL:
        return make.of(_LOGICAL[op.function], *op.operands)
    if op.function == "eq":
        return make.of("not", make.of("xor", *op.operands))
    return make.of(op.function, *map(number, op.operands))
