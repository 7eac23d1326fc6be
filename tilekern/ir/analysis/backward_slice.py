"""Backward slices: the ops of a block that values depend on, and the values that depend on its index alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tilekern.ir.core import Block, Op, Value


def backward_slice(ops: Sequence[Op], values: Iterable[Value], available: Collection[Value] = ()) -> list[Op]:
    """The ops, in their order, that compute `values`; `available` values need no op."""
    needed = set(values)
    sliced: list[Op] = []
    for op in reversed(ops):
        if any(result in needed and result not in available for result in op.results):
            sliced.append(op)
            needed.update(op.uses())
    return sliced[::-1]


def index_values(body: Block) -> set[Value]:
    """The results of pure ops in a fold's body that depend on the index and on values from outside alone."""
    inside = {*body.args, *(v for op in body.ops for v in op.results)}
    values: set[Value] = set()
    for op in body.ops:
        if op.pure and not op.regions and all(v not in inside or v is body.args[0] or v in values for v in op.uses()):
            values.update(op.results)
    return values
