"""Backward slices: the ops of a block that values depend on, and the values that depend on its index alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tilekern.ir.core import Block, Op, Value


def backward_slice(ops: Sequence[Op], values: Iterable[Value], given: Collection[Value] = ()) -> list[Op]:
    """The ops, in their order, by which `values` are computed; `given` values are not computed again."""
    wanted = set(values)
    found: list[Op] = []
    for op in reversed(ops):
        if any(result in wanted and result not in given for result in op.results):
            found.append(op)
            wanted.update(op.uses())
    return found[::-1]


def index_values(body: Block) -> set[Value]:
    """The results in a fold's body that depend on nothing but the index and what is outside, by pure ops."""
    inside = {*body.args, *(v for op in body.ops for v in op.results)}
    found: set[Value] = set()
    for op in body.ops:
        if op.pure and not op.regions and all(v not in inside or v is body.args[0] or v in found for v in op.uses()):
            found.update(op.results)
    return found
