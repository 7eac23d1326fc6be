"""Check that programs keep apart in the arrays that they write, where the grid alone decides the positions.

    i = tk.parallel(13, 8);  out[(i.indices * 2) % 13] = x[i]     lanes 13, 14 and 15 have the places 0, 2 and 4
    i = tk.parallel(10, 4);  d[i] = d[i - 1]                      program 1 loads d[3], which program 0 stores

Lanes behind the end of an axis have positions, too, and arithmetic may bring these back into the array. A donated array
holds what other programs stored, or not yet. A compiled program sees neither, and returns wrong numbers. Positions
without data are the same in each call, so they are evaluated, program by program, of large grids for the first and
the last programs. A kernel is refused only if each of its calls is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from tilekern import source
from tilekern.errors import OrderDependenceError, OutputError
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.touched import Touched
from tilekern.lang.unwritten import live_ops

_PROGRAMS, _PROGRAMS_THAT_LOAD, _LANES = 512, 64, 1 << 18  # most that are evaluated: milliseconds

type Evaluated = Mapping[Load | Store, Sequence[Op]]
"""The ops that compute the positions of each access, in order."""


def check_collisions(func: Func) -> None:
    """Raise an error if two programs surely store one element by an index vector, or one loads what another stores.

    Raises:
      OutputError: two programs store one element.
      OrderDependenceError: a program loads an element that another program stores.
    """
    accesses = [op for op in func.body.ops if isinstance(op, (Load, Store)) and op.ref.ref.role != "in"]
    stores = [op for op in accesses if isinstance(op, Store)]
    if not stores:
        return
    definitions = {v: op for op in func.body.ops for v in op.results}
    by_vectors = [store for store in stores if any(v.tile.shape for v in store.positions)]
    for store, needed in _evaluated(func, by_vectors, definitions).items():
        _check_store(func, store, needed)
    loaded = {op.ref for op in accesses if isinstance(op, Load)} & {op.ref for op in stores}
    live = live_ops(func) if loaded else set[Op]()
    for ref in loaded:
        touching = [op for op in accesses if op.ref is ref and (isinstance(op, Store) or op in live)]
        if len({(op.access, op.positions) for op in touching}) > 1:  # not each program its own elements alone
            _check_loads(func, _evaluated(func, touching, definitions))


def _evaluated(func: Func, accesses: Sequence[Load | Store], definitions: dict[Value, Op]) -> Evaluated:
    """The accesses whose positions and mask the grid alone decides."""
    ops = {op: _ops_of_positions(op, definitions, func.body.args) for op in accesses}
    return {op: needed for op, needed in ops.items() if needed is not None}


def _ops_of_positions(access: Load | Store, definitions: dict[Value, Op], grid: Sequence[Value]) -> list[Op] | None:
    needed, pending = set[Op](), _decided_by(access)
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


def _decided_by(access: Load | Store) -> list[Value]:
    return [v for v in (*access.positions, access.mask) if v is not None]


def _programs(func: Func, evaluated: Evaluated, most: int) -> Iterator[Mapping[Value, Array]]:
    """The values of positions in some programs, which differ in the indices that a position depends on."""
    used = {v for op, ops in evaluated.items() for v in (*_decided_by(op), *(w for o in ops for w in o.operands))}
    axes = list(zip(func.body.args, func.axes, strict=True))
    sizes = [axis.tiles if arg in used else min(axis.tiles, 1) for arg, axis in axes]
    lanes = max((prod(op.access.shape) for op in evaluated), default=1)
    count, most = prod(sizes), min(most, _LANES // max(lanes, 1))
    if count <= most:
        indices = product(*map(range, sizes))
    else:
        ends = [*range(most // 2), *range(count - most // 2, count)]
        indices = iter(np.stack(np.unravel_index(ends, sizes), 1)) if ends else iter(())
    ops = dict.fromkeys(op for needed in evaluated.values() for op in needed)
    for index in indices:
        values = {arg: np.asarray(n, np.int32) for (arg, _), n in zip(axes, index, strict=True)}
        for op in ops:
            values[op.result] = np.asarray(op.evaluate(*(values[v] for v in op.operands)))
        yield values


class _Owners:
    """The program that stores each element: numbers of programs, by flat indices in ascending order."""

    def __init__(self, parts: Sequence[Array]) -> None:
        """`parts` has the flat indices that each program stores."""
        flat = np.concatenate([np.zeros(0, np.int64), *(part.reshape(-1) for part in parts)])
        programs = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        order = np.argsort(flat, kind="stable")
        self.flat, self.programs = flat[order], programs[order]

    def stored_twice(self) -> Array:
        """The elements that two programs store."""
        same = (self.flat[1:] == self.flat[:-1]) & (self.programs[1:] != self.programs[:-1])
        return self.flat[1:][same]

    def foreign(self, flat: Array, program: int) -> Array:
        """The elements at `flat` that another program stores."""
        flat = flat.reshape(-1)
        if not self.flat.size:
            return flat[:0]
        place = np.minimum(np.searchsorted(self.flat, flat), self.flat.size - 1)
        return flat[(self.flat[place] == flat) & (self.programs[place] != program)]


def _check_store(func: Func, store: Load | Store, needed: Sequence[Op]) -> None:
    access = Touched(store, {})
    twice = _Owners([access.elements(v)[0] for v in _programs(func, {store: needed}, _PROGRAMS)]).stored_twice()
    if twice.size:
        with source.at(store.loc):
            raise OutputError(
                f"2 programs store the same elements of {store.ref.name}",
                expected="one program for each element of an output, also by lanes behind the end of an axis",
                got=f"an index vector by which two programs store element {_element(store, twice)}",
                fix=f"mask lanes behind the end: {store.ref.name}.store(index, value, mask=i.valid); "
                "sum over programs in a tk.Sum",
            )


def _check_loads(func: Func, evaluated: Evaluated) -> None:
    accesses = {op: Touched(op, {}) for op in evaluated}
    programs = list(_programs(func, evaluated, _PROGRAMS_THAT_LOAD))
    touched = {op: [access.elements(values)[0] for values in programs] for op, access in accesses.items()}
    for store in (op for op in touched if isinstance(op, Store)):
        owners = _Owners(touched[store])
        for load in (op for op in touched if isinstance(op, Load)):
            for program, flat in enumerate(touched[load]):
                foreign = owners.foreign(flat, program)
                if foreign.size:
                    raise _loaded(load, foreign)


def _loaded(load: Load, foreign: Array) -> OrderDependenceError:
    with source.at(load.loc):
        return OrderDependenceError(
            f"a program loads {load.ref.name}{_element(load, foreign)}, which another program stores",
            expected="loads of what the program itself stored, or of what no program stores",
            got=f"a load of {load.ref.name}, which programs change in any order",
            fix="write to an output of its own, and load from an input; add by .at[...].add in a tk.Sum or a tk.Zeros",
        )


def _element(access: Load | Store, flat: Array) -> str:
    return "[" + ", ".join(str(int(n)) for n in np.unravel_index(int(flat[0]), access.extents)) + "]"
