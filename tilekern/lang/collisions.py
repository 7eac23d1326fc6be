"""Check that programs keep apart in the arrays that they write, where the grid alone decides the positions.

    i = tk.parallel(13, 8);  out[(i.indices * 2) % 13] = x[i]     lanes 13, 14 and 15 have the places 0, 2 and 4
    i = tk.parallel(10, 4);  d[i] = d[i - 1]                      program 1 loads d[3], which program 0 stores

Lanes behind the end of an axis have positions, too, and arithmetic may bring these back into the array. A donated array
holds what other programs stored, or not yet. A compiled program sees neither, and returns wrong numbers. Positions
without data are the same in each call, so the accesses of programs are evaluated, of large grids for the first and
the last programs. A kernel is refused only if each of its calls is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern import source
from tilekern.errors import OrderDependenceError, OutputError
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.records import record
from tilekern.lang.grid_accesses import Accesses
from tilekern.lang.unwritten import live_ops

_PROGRAMS, _PROGRAMS_THAT_LOAD = 512, 64  # most that are evaluated


def check_collisions(func: Func) -> None:
    """Raise an error if two programs surely store one element, or one loads what another stores.

    Raises:
      OutputError: two programs store one element.
      OrderDependenceError: a program loads an element that another program stores.
    """
    accesses = [op for op in func.walk() if isinstance(op, (Load, Store)) and op.ref.ref.role != "in"]
    stored = {op.ref for op in accesses if isinstance(op, Store)}
    live = live_ops(func) if any(isinstance(op, Load) and op.ref in stored for op in accesses) else set[Op]()
    for ref in stored:
        touching = [op for op in accesses if op.ref is ref and (isinstance(op, Store) or op in live)]
        if not _keep_apart(func, touching):
            _check_ref(func, touching)


def _keep_apart(func: Func, touching: Sequence[Load | Store]) -> bool:
    """True if each index of the grid has a dim in which it alone decides a slot, the same for all accesses."""
    if len({op.extents for op in touching}) > 1:  # a reshaped view has dims of its own
        return False
    slots = set[_Slot].intersection(*({s for n in range(len(op.extents)) if (s := _slot(op, n))} for op in touching))
    apart = {slot.index for slot in slots}
    return apart.issuperset(arg for arg, axis in zip(func.body.args, func.axes, strict=True) if axis.tiles > 1)


@record
class _Slot:
    """The elements from `index * size` to `(index + 1) * size` along a dim."""

    dim: int
    index: Value
    size: int


def _slot(access: Load | Store, number: int) -> _Slot | None:
    """The slot along a dim that no lane of an access leaves."""
    dim = access.access.dims[number]
    terms, lanes = dim.position.terms, dim.size if dim.kind == "block" else 1
    if len(terms) != 1 or terms[0].div > 1 or terms[0].mod or dim.kind not in ("block", "index"):
        return None
    (term,) = terms
    inside = 0 <= dim.position.const <= term.stride - lanes
    return _Slot(number, access.positions[term.operand], term.stride) if inside else None


def _check_ref(func: Func, touching: Sequence[Load | Store]) -> None:
    stores = [op for op in touching if isinstance(op, Store)]
    _check_stores(stores, Accesses(func, stores).of_programs(_PROGRAMS))
    if len(stores) < len(touching):
        _check_loads(touching, Accesses(func, touching).of_programs(_PROGRAMS_THAT_LOAD))


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


def _owners(stores: Sequence[Store], programs: Sequence[dict[Op, Array]]) -> _Owners:
    return _Owners([np.concatenate([touched[op] for op in stores]) for touched in programs])


def _check_stores(stores: Sequence[Store], programs: Sequence[dict[Op, Array]]) -> None:
    twice = _owners(stores, programs).stored_twice()
    if twice.size:
        element = twice[:1]
        last = next(op for op in reversed(stores) if any(np.isin(element, touched[op]) for touched in programs))
        with source.at(last.loc):
            raise OutputError(
                f"2 programs store the same elements of {last.ref.name}",
                expected="one program for each element of an output, also by lanes behind the end of an axis",
                got=f"two programs that store element {_element(last, element)}",
                fix="index the output by a tile of every tk.parallel; mask lanes behind the end: "
                f"{last.ref.name}.store(index, value, mask=i.valid); sum over programs in a tk.Sum",
            )


def _check_loads(touching: Sequence[Load | Store], programs: Sequence[dict[Op, Array]]) -> None:
    owners = _owners([op for op in touching if isinstance(op, Store)], programs)
    for load in (op for op in touching if isinstance(op, Load)):
        for program, touched in enumerate(programs):
            foreign = owners.foreign(touched[load], program)
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
