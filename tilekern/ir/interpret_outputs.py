"""The outputs of an interpreted Func, and the programs that touched their elements."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np

from tilekern import source
from tilekern.errors import OrderDependenceError, UnwrittenError, WriteConflictError
from tilekern.ir.compute import ufunc
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.memory import AtomicKind
from tilekern.ir.types import BOOL, DType, kind_of
from tilekern.source import Loc

_NOBODY = -1
_KINDS: tuple[AtomicKind, ...] = get_args(AtomicKind)


class Output:
    """An output array, flat, and the programs that touched its elements."""

    def __init__(self, param: Value, initial: Array | None) -> None:
        self.param = param
        size = math.prod(param.ref.shape)
        self._must_store = param.ref.role == "out"
        start = _poison(param.ref.dtype) if self._must_store else np.zeros((), param.ref.dtype)
        self.data = np.full(size, start) if initial is None else initial.copy()
        self._updates: list[tuple[int, AtomicKind, Array, Array]] = []  # (program, kind, flat indices, values)
        self._updated = np.zeros(size, np.int8)  # the kind of update of an element, from 1 on; 0: none
        self._owner = np.full(size, _NOBODY)  # the program that stored an element
        self._reads: list[tuple[int, Loc]] = []  # (program, place) of the loads of elements not stored yet
        self._read = np.full(size, _NOBODY)  # for each element, the index in `_reads` of its first load

    def load(self, flat: Array, program: int, loc: Loc) -> Array:
        """The elements at flat indices, which no other program may have stored."""
        owner = self._owner[flat]
        if (foreign := (owner != program) & (owner != _NOBODY)).any():
            self._raise_dependence(flat[foreign][0], loc)
        if (updated := self._updated[flat] != 0).any():
            self._raise_mixed(flat[updated][0], loc)
        # An element that nobody stored yet: `store` refuses a later store by another program, `finish` a missing one.
        early = flat[(owner == _NOBODY) & (self._read[flat] == _NOBODY)]
        if early.size:
            self._read[early] = len(self._reads)
            self._reads.append((program, loc))
        return self.data[flat]

    def store(self, flat: Array, values: Array, program: int, loc: Loc) -> None:
        """Store elements, which no other program may have stored or loaded."""
        owner = self._owner[flat]
        if (foreign := (owner != program) & (owner != _NOBODY)).any():
            with source.at(loc):
                raise WriteConflictError(
                    f"two programs store {self._element(flat[foreign][0])}",
                    expected="one program for each element of an output",
                    fix="index the output by a tile of every tk.parallel; sum over programs in a tk.Sum",
                )
        self._check_not_both(flat[self._updated[flat] != 0], loc)
        if (early := (owner == _NOBODY) & (self._read[flat] != _NOBODY)).any():
            element = flat[early][0]
            reader, read_at = self._reads[self._read[element]]
            if reader != program:
                self._raise_dependence(element, read_at)
            if self._must_store:
                self._raise_unwritten(f"{self._element(element)} is loaded before it is stored", read_at)
        self._owner[flat] = program
        self.data[flat] = values

    def update(self, flat: Array, values: Array, kind: AtomicKind, program: int, loc: Loc) -> None:
        """Note an atomic update; `finish` makes all updates, in program order, so that a sum is rounded once."""
        self._check_not_both(flat[self._owner[flat] != _NOBODY], loc)
        number, before = 1 + _KINDS.index(kind), self._updated[flat]
        if (mixed := (self._read[flat] != _NOBODY) | (before != 0) & (before != number)).any():
            self._raise_mixed(flat[mixed][0], loc)
        self._updated[flat] = number
        self._updates.append((program, kind, flat, values))

    def finish(self, func: Func) -> Array:
        """The array in its shape, after all programs: makes the atomic updates.

        Raises:
          UnwrittenError: no program stored an element that must be stored.
        """
        if self._updates:
            self.data = _updated(self.data, sorted(self._updates, key=lambda update: update[0]))
        if not self._must_store:
            return self.data.reshape(self.param.ref.shape)
        missing = np.flatnonzero(self._owner == _NOBODY)
        if missing.size:
            read = missing[self._read[missing] != _NOBODY]
            if read.size:
                _, loc = self._reads[self._read[read[0]]]
                self._raise_unwritten(f"{self._element(read[0])} is loaded and never stored", loc)
            count = f"{missing.size} of {self._owner.size} elements"
            self._raise_unwritten(f"{self._element(missing[0])} is never stored", func.loc, f"{count} left out")
        return self.data.reshape(self.param.ref.shape)

    def _element(self, flat: int) -> str:
        index = np.unravel_index(flat, self.param.ref.shape)
        return f"{self.param.name}[{', '.join(map(str, index))}]"

    def _check_not_both(self, elements: Array, loc: Loc) -> None:
        if elements.size:
            with source.at(loc):
                raise WriteConflictError(
                    f"{self._element(elements[0])} is stored and updated atomically",
                    expected="stores or updates of an element, not both",
                    fix="start from an input that donate= names, or from the zeros of a tk.Zeros, and update only",
                )

    def _raise_mixed(self, element: int, loc: Loc) -> None:
        with source.at(loc):
            raise OrderDependenceError(
                f"{self._element(element)} is updated atomically, and loaded or updated in another way",
                expected="updates of one kind only",
                fix="use one kind of update; load the results in another kernel",
            )

    def _raise_dependence(self, element: int, loc: Loc) -> None:
        with source.at(loc):
            raise OrderDependenceError(
                f"a program loads {self._element(element)}, which another program stores",
                expected="loads of what the same program stored before",
                fix="let one program do both, in a loop over tk.serial; or load in another kernel",
            )

    def _raise_unwritten(self, summary: str, loc: Loc, got: str = "") -> None:
        with source.at(loc):
            raise UnwrittenError(
                summary,
                expected="every element of an output stored once",
                got=got,
                fix="store it in every program, before it is loaded; declare an output that may stay 0 as tk.Zeros",
            )


def _updated(data: Array, updates: list[tuple[int, AtomicKind, Array, Array]]) -> Array:
    """The flat array after atomic updates; sums of floats are taken in float64 and rounded once."""
    kinds = {kind for _, kind, _, _ in updates}
    wide = data.astype(np.float64) if kinds == {"add"} and kind_of(data.dtype) == "float" else data.copy()
    with np.errstate(all="ignore"):
        for _, kind, flat, values in updates:
            ufunc(kind).at(wide, flat, values.astype(wide.dtype))
    return wide.astype(data.dtype)


def _poison(dtype: DType) -> Array:
    """The value of an element that no program has stored."""
    if kind_of(dtype) == "float":
        return np.asarray(np.nan, dtype)
    if dtype == BOOL:
        return np.asarray(True)
    return np.frombuffer(b"\xa5" * dtype.itemsize, dtype)[0]
