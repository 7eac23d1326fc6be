"""Backward slices: the ops of a block that values depend on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tilekern.ir.core import Op, Value


def backward_slice(ops: Sequence[Op], values: Iterable[Value], given: Collection[Value] = ()) -> list[Op]:
    """The ops, in their order, by which `values` are computed; `given` values are not computed again."""
    wanted = set(values)
    found: list[Op] = []
    for op in reversed(ops):
        if any(result in wanted and result not in given for result in op.results):
            found.append(op)
            wanted.update(op.uses())
    return found[::-1]
