"""Check that no two programs store one element by an index vector, where the grid alone decides the positions.

    i = tk.parallel(13, 8);  out[(i.indices * 2) % 13] = x[i]     lanes 13, 14 and 15 have the places 0, 2 and 4

Lanes behind the end of an axis have positions, too, and arithmetic may bring these back into the array. A compiled
program stores there what such lanes hold, and no later check sees it. Positions without data are the same in each call,
so the index vectors are evaluated, program by program, for small grids. A kernel is refused only if each of its
calls is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from tilekern import source
from tilekern.errors import OutputError
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.interpret_accesses import Touched
from tilekern.ir.memory import Store

_PROGRAMS, _LANES, _ELEMENTS = 512, 1 << 20, 1 << 24  # most that are evaluated: milliseconds, and 64 MiB


def check_collisions(func: Func) -> None:
    """Raise `OutputError` if two programs surely store one element of an output."""
    definitions = {v: op for op in func.body.ops for v in op.results}
    for op in func.body.ops:
        if isinstance(op, Store) and any(v.tile.shape for v in op.positions):
            ops = _ops_of_positions(op, definitions, func.body.args)
            if ops is not None:
                _check(func, op, ops)


def _ops_of_positions(store: Store, definitions: dict[Value, Op], grid: Sequence[Value]) -> list[Op] | None:
    """The ops, in order, that compute positions and mask of a store from the grid alone; None if data takes part."""
    needed, pending = set[Op](), [v for v in (*store.positions, store.mask) if v is not None]
    while pending:
        value = pending.pop()
        op = definitions.get(value)
        if value in grid or op in needed:
            continue
        if op is None or not op.pure or op.regions:
            return None
        needed.add(op)
        pending += op.operands
    return [op for op in dict.fromkeys(definitions.values()) if op in needed]


def _check(func: Func, store: Store, ops: Sequence[Op]) -> None:
    """Evaluate a store in programs that differ in the indices that its positions depend on, and are first in others."""
    used = {*store.positions, store.mask, *(v for op in ops for v in op.operands)}
    ranges = [
        range(axis.tiles if arg in used else min(axis.tiles, 1))
        for arg, axis in zip(func.body.args, func.axes, strict=True)
    ]
    programs, elements = prod(map(len, ranges)), prod(store.extents)
    if programs > _PROGRAMS or programs * prod(store.access.shape) > _LANES or elements > _ELEMENTS:
        return
    access, owner = Touched(store, {}), np.full(elements, -1, np.int32)
    for number, indices in enumerate(product(*ranges)):
        flat, _ = access.elements(_values(func, ops, indices))
        stolen = flat[(owner[flat] >= 0) & (owner[flat] != number)]
        if stolen.size:
            raise _stored_twice(store, int(stolen[0]))
        owner[flat] = number


def _values(func: Func, ops: Sequence[Op], indices: Sequence[int]) -> dict[Value, Array]:
    values = {arg: np.asarray(index, np.int32) for arg, index in zip(func.body.args, indices, strict=True)}
    for op in ops:
        values[op.result] = np.asarray(op.evaluate(*(values[v] for v in op.operands)))
    return values


def _stored_twice(store: Store, flat: int) -> OutputError:
    element = ", ".join(str(int(n)) for n in np.unravel_index(flat, store.extents))
    with source.at(store.loc):
        return OutputError(
            f"2 programs store the same elements of {store.ref.name}",
            expected="one program for each element of an output, also by lanes behind the end of an axis",
            got=f"an index vector by which two programs store element [{element}]",
            fix=f"mask lanes behind the end: {store.ref.name}.store(index, value, mask=i.valid); "
            "sum over programs in a tk.Sum",
        )
