"""Run a Func on NumPy arrays, program by program: the definition of what a Func means.

Beyond the values, it checks what no accelerator does: that dims proved in bounds are, that every element of an output
is stored, by one program only, and that no program sees what another one stored.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tilekern import source
from tilekern.errors import (
    ArgumentError,
    DeviceAssertionError,
    OrderDependenceError,
    OutOfBoundsError,
    UnwrittenError,
    WriteConflictError,
)
from tilekern.ir.compute import ufunc
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.memory import Atomic, AtomicKind, Dim, Load, MemoryOp, Store
from tilekern.ir.types import BOOL, DType, TileType, kind_of
from tilekern.source import Loc

_NOBODY = -1


def interpret(func: Func, *arrays: Any, orders: int = 2, seed: int = 0) -> tuple[Array, ...]:
    """The outputs of `func`, in the order of its params, for its inputs `arrays`.

    Programs run in row-major order, then again in `orders - 1` shuffled orders, which must give the same bits. Outputs
    start as poison: NaN in floats, an odd bit pattern in integers.

    Raises:
      ArgumentError: the arrays do not fit the inputs.
      OutOfBoundsError: a dim proved in bounds has a lane outside.
      UnwrittenError: an element of an output is never stored, or is loaded before its program stores it.
      WriteConflictError: two programs store one element, or it is both stored and updated atomically.
      OrderDependenceError: a program loads an element that another stores, or two orders give different results; an
        element is updated atomically, and loaded or updated in another way.
      DeviceAssertionError: a program asserts what does not hold.
    """
    inputs = _check(func, arrays)
    programs = list(enumerate(product(*map(range, func.grid))))
    outputs = _run(func, inputs, programs)
    rng = np.random.default_rng(seed)
    for _ in range(orders - 1 if len(programs) > 1 else 0):
        again = _run(func, inputs, [programs[p] for p in rng.permutation(len(programs))])
        for param, first, second in zip(func.outputs, outputs, again, strict=True):
            if first.tobytes() != second.tobytes():
                with source.at(func.loc):
                    raise OrderDependenceError(f"the result %{param.name} depends on the order in which programs run")
    return outputs


def _check(func: Func, arrays: tuple[Any, ...]) -> tuple[Array, ...]:
    if len(arrays) != len(func.inputs):
        names = ", ".join(p.name for p in func.inputs)
        raise ArgumentError(
            f"{func.name} takes {len(func.inputs)} arrays", expected=f"({names})", got=f"{len(arrays)} arrays"
        )
    inputs = tuple(map(np.asarray, arrays))
    for param, array in zip(func.inputs, inputs, strict=True):
        wanted, found = TileType(param.ref.shape, param.ref.dtype), TileType(array.shape, array.dtype)
        if wanted != found:
            raise ArgumentError(
                f"an argument of {func.name} has the wrong type", expected=str(wanted), got=f"{param.name}={found}"
            )
    return inputs


def _run(func: Func, inputs: tuple[Array, ...], programs: list[tuple[int, tuple[int, ...]]]) -> tuple[Array, ...]:
    """The outputs of one run over all programs, numbered in row-major order, in the given order."""
    arrays = {p: x.reshape(-1) for p, x in zip(func.inputs, inputs, strict=True)}
    outputs = {p: _Output(p, arrays.get(p)) for p in func.outputs}
    for number, indices in programs:
        _Program(number, arrays, outputs).run(func.body, [np.asarray(i, np.int32) for i in indices])
    return tuple(output.finish(func) for output in outputs.values())


class _Output:
    """An output array, flat, and who touched its elements."""

    def __init__(self, param: Value, given: Array | None) -> None:
        self.param = param
        size = int(np.prod(param.ref.shape, dtype=np.int64))
        self._must_store = param.ref.role == "out"
        start = _poison(param.ref.dtype) if self._must_store else np.zeros((), param.ref.dtype)
        self.data = np.full(size, start) if given is None else given.copy()
        self._updates: list[tuple[int, AtomicKind, Array, Array]] = []  # by program: where, with what
        self._updated = np.full(size, "", "U3")  # the kind of update of an element
        self._owner = np.full(size, _NOBODY)  # the program that stored an element
        self._reads: list[tuple[int, Loc]] = []  # the loads of elements not stored yet: by which program, where
        self._read = np.full(size, _NOBODY)  # the first of them for each element

    def load(self, where: Array, program: int, loc: Loc) -> Array:
        owner = self._owner[where]
        if (foreign := (owner != program) & (owner != _NOBODY)).any():
            self._raise_dependence(where[foreign][0], loc)
        if (updated := self._updated[where] != "").any():
            self._raise_mixed(where[updated][0], loc)
        # Whether this is a read of something unwritten or of what another program stores later, the end will tell.
        early = where[(owner == _NOBODY) & (self._read[where] == _NOBODY)]
        if early.size:
            self._read[early] = len(self._reads)
            self._reads.append((program, loc))
        return self.data[where]

    def store(self, where: Array, values: Array, program: int, loc: Loc) -> None:
        owner = self._owner[where]
        if (foreign := (owner != program) & (owner != _NOBODY)).any():
            with source.at(loc):
                raise WriteConflictError(f"two programs store {self._element(where[foreign][0])}")
        self._check_not_both(where[self._updated[where] != ""], loc)
        if (early := (owner == _NOBODY) & (self._read[where] != _NOBODY)).any():
            element = where[early][0]
            reader, read_at = self._reads[self._read[element]]
            if reader != program:
                self._raise_dependence(element, read_at)
            if self._must_store:
                self._raise_unwritten(f"{self._element(element)} is loaded before it is stored", read_at)
        self._owner[where] = program
        self.data[where] = values

    def update(self, where: Array, values: Array, kind: AtomicKind, program: int, loc: Loc) -> None:
        """Note an atomic update; `finish` makes them all, in program order, so that a sum has one rounding."""
        self._check_not_both(where[self._owner[where] != _NOBODY], loc)
        if (mixed := (self._read[where] != _NOBODY) | ~np.isin(self._updated[where], ["", kind])).any():
            self._raise_mixed(where[mixed][0], loc)
        self._updated[where] = kind
        self._updates.append((program, kind, where, values))

    def finish(self, func: Func) -> Array:
        """The array, once every program has run."""
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
                raise WriteConflictError(f"{self._element(elements[0])} is stored and updated atomically")

    def _raise_mixed(self, element: int, loc: Loc) -> None:
        with source.at(loc):
            raise OrderDependenceError(
                f"{self._element(element)} is updated atomically, and loaded or updated in another way",
                expected="updates of one kind only",
            )

    def _raise_dependence(self, element: int, loc: Loc) -> None:
        with source.at(loc):
            raise OrderDependenceError(
                f"a program loads {self._element(element)}, which another program stores",
                expected="loads of what the same program stored before",
            )

    def _raise_unwritten(self, summary: str, loc: Loc, got: str = "") -> None:
        with source.at(loc):
            raise UnwrittenError(summary, expected="every element of an output stored once", got=got)


class _Program:
    """One program of the grid: the values it has computed so far."""

    def __init__(self, number: int, inputs: dict[Value, Array], outputs: dict[Value, _Output]) -> None:
        self._number, self._inputs, self._outputs = number, inputs, outputs
        self._values: dict[Value, Array] = {}

    def run(self, block: Block, args: list[Array]) -> list[Array]:
        """Run a block on its arguments; returns what it yields."""
        self._values.update(zip(block.args, args, strict=True))
        for op in block.ops:
            results = self._results(op)
            self._values.update(zip(op.results, results, strict=True))
        return self._all(block.results)

    def _all(self, values: tuple[Value, ...]) -> list[Array]:
        return [self._values[v] for v in values]

    def _results(self, op: Op) -> list[Array]:
        match op:
            case Load():
                return [self._load(op)]
            case Store():
                self._store(op)
                return []
            case Atomic():
                where, touched = self._lanes(op)
                self._outputs[op.ref].update(where, self._values[op.value][touched], op.kind, self._number, op.loc)
                return []
            case Print():
                print(op.format.format(*self._all(op.operands)))  # noqa: T201 -- what it is for
                return []
            case Assert():
                if not np.all(self._values[op.operands[0]]):
                    with source.at(op.loc):
                        raise DeviceAssertionError(op.message)
                return []
            case Fold():
                return self._fold(op)
            case While():
                return self._while(op)
            case Switch():
                chosen = min(max(int(self._values[op.operands[0]]), 0), len(op.regions) - 1)
                return self.run(op.regions[chosen], [])
            case _:
                result = np.asarray(op.evaluate(*self._all(op.operands)))
                found = TileType(result.shape, result.dtype)
                assert found == op.result.tile, f"{op.name} evaluates to {found}, its type is {op.result.tile}"
                return [result]

    # --- control ---

    def _fold(self, op: Fold) -> list[Array]:
        axis = op.axis
        start, stop = (int(self._values[v]) for v in (op.start, op.stop))
        tiles = range(axis.first_tile(start), axis.end_tile(stop))
        carries = self._all(op.inits)
        for t in reversed(tiles) if op.reverse else tiles:
            carries = self.run(op.body, [np.asarray(t, np.int32), *carries])
        return carries

    def _while(self, op: While) -> list[Array]:
        carries = self._all(op.operands)
        while self.run(op.condition, carries)[0]:
            carries = self.run(op.body, carries)
        return carries

    # --- memory ---

    def _load(self, op: Load) -> Array:
        where, touched = self._lanes(op)
        fill = 0 if op.fill is None else self._values[op.fill]
        lanes = np.full(touched.shape, fill, op.ref.ref.dtype)
        output = self._outputs.get(op.ref)
        lanes[touched] = output.load(where, self._number, op.loc) if output else self._inputs[op.ref][where]
        return lanes

    def _store(self, op: Store) -> None:
        where, touched = self._lanes(op)
        self._outputs[op.ref].store(where, self._values[op.value][touched], self._number, op.loc)

    def _lanes(self, op: MemoryOp) -> tuple[Array, Array]:
        """The flat indices of the accessed lanes, and a bool array that marks these lanes."""
        shape = op.access.shape
        flat, touched = np.zeros(shape, np.int64), np.ones(shape, BOOL)
        for number, (dim, lane, length) in enumerate(zip(op.access.dims, op.access.lanes, op.extents, strict=True)):
            indices = self._indices(op, dim)
            inside = (indices >= 0) & (indices < length)
            if dim.in_bounds and not inside.all():
                with source.at(op.loc):
                    raise OutOfBoundsError(
                        f"a lane of dim {number} of {op.ref.name}, proved in bounds, is not",
                        expected=f"0 <= index < {length}",
                        got=f"index={np.extract(~inside, indices)[0]}",
                    )
            along = [dim.size if n == lane else 1 for n in range(len(shape))]
            flat = flat * length + np.where(inside, indices, 0).reshape(along)
            touched = touched & inside.reshape(along)
        if op.mask is not None:
            touched = touched & self._values[op.mask]
        return flat[touched], touched

    def _indices(self, op: MemoryOp, dim: Dim) -> Array:
        """The index of each lane along one dim; positions never wrap."""
        position = np.asarray(dim.position.const, np.int64)
        for term in dim.position.terms:
            number = self._values[op.positions[term.operand]].astype(np.int64)
            position = position + term.stride * term.digit(number)
        return position + np.arange(dim.size) if dim.kind == "block" else position


def _updated(data: Array, updates: list[tuple[int, AtomicKind, Array, Array]]) -> Array:
    """The flat array after atomic updates; sums of floats are taken in float64 and rounded once."""
    kinds = {kind for _, kind, _, _ in updates}
    wide = data.astype(np.float64) if kinds == {"add"} and kind_of(data.dtype) == "float" else data.copy()
    with np.errstate(all="ignore"):
        for _, kind, where, values in updates:
            ufunc(kind).at(wide, where, values.astype(wide.dtype))
    return wide.astype(data.dtype)


def _poison(dtype: DType) -> Array:
    """The value of an element that no program has stored."""
    if kind_of(dtype) == "float":
        return np.asarray(np.nan, dtype)
    if dtype == BOOL:
        return np.asarray(True)
    return np.frombuffer(b"\xa5" * dtype.itemsize, dtype)[0]
