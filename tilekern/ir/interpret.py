"""Run a Func on NumPy arrays, program by program: the definition of a Func's meaning.

The interpreter also checks what no accelerator checks: dims that are proved in bounds are in bounds, every element of
an output is stored, by one program only, and no program sees an element that another program stored.
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
)
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.index_vectors import valid_lanes
from tilekern.ir.interpret_outputs import Output
from tilekern.ir.memory import Atomic, Load, MemoryOp, WriteOp
from tilekern.ir.touched import Touched
from tilekern.ir.types import TileType


def interpret(func: Func, *arrays: Any, orders: int = 2, seed: int = 0) -> tuple[Array, ...]:
    """The outputs of `func`, in the order of its params, for its inputs `arrays`.

    Programs run in row-major order, then again in `orders - 1` shuffled orders, which must give the same bits. Outputs
    start as poison: NaN in floats, an odd bit pattern in integers.

    Raises:
      ArgumentError: the arrays do not fit the inputs.
      OutOfBoundsError: a dim proved in bounds has a lane outside, or a lane of an index vector that was read outside
        of an array, or is computed from one, addresses an element.
      UnwrittenError: an element of an output is never stored, or is loaded before its program stores it.
      WriteConflictError: two programs store one element, or it is both stored and updated atomically.
      OrderDependenceError: a program loads an element that another program stores, or two orders give different bits;
        an element is updated atomically, and loaded or updated in another way.
      DeviceAssertionError: an assertion does not hold.
    """
    inputs = _check(func, arrays)
    programs = list(enumerate(product(*map(range, func.grid))))
    outputs = _run(func, inputs, programs)
    rng = np.random.default_rng(seed)
    for _ in range(orders - 1 if len(programs) > 1 else 0):
        reordered = _run(func, inputs, [programs[p] for p in rng.permutation(len(programs))])
        for param, first, second in zip(func.outputs, outputs, reordered, strict=True):
            if first.tobytes() != second.tobytes():
                with source.at(func.loc):
                    raise OrderDependenceError(
                        f"the result %{param.name} depends on the order in which programs run",
                        expected="the same bits in any order",
                        fix="please report it, if no op of the kernel has an effect outside of it",
                    )
    return outputs


def _check(func: Func, arrays: tuple[Any, ...]) -> tuple[Array, ...]:
    if len(arrays) != len(func.inputs):
        names = ", ".join(p.name for p in func.inputs)
        raise ArgumentError(
            f"{func.name} takes {len(func.inputs)} arrays", expected=f"({names})", got=f"{len(arrays)} arrays"
        )
    inputs = tuple(map(np.asarray, arrays))
    for param, array in zip(func.inputs, inputs, strict=True):
        expected, actual = TileType(param.ref.shape, param.ref.dtype), TileType(array.shape, array.dtype)
        if expected != actual:
            raise ArgumentError(
                f"an argument of {func.name} has the wrong type", expected=str(expected), got=f"{param.name}={actual}"
            )
    return inputs


def _run(func: Func, inputs: tuple[Array, ...], programs: list[tuple[int, tuple[int, ...]]]) -> tuple[Array, ...]:
    """The outputs of one run over all programs, numbered in row-major order, in the given order."""
    arrays = {p: x.reshape(-1) for p, x in zip(func.inputs, inputs, strict=True)}
    func, valid = valid_lanes(func)
    accesses = {op: Touched(op, valid.get(op, {})) for op in func.walk() if isinstance(op, MemoryOp)}
    outputs = {p: Output(p, arrays.get(p)) for p in func.outputs}
    for number, indices in programs:
        _Program(number, arrays, outputs, accesses).run(func.body, [np.asarray(i, np.int32) for i in indices])
    return tuple(output.finish(func) for output in outputs.values())


class _Program:
    """One program of the grid: the values it has computed so far."""

    def __init__(
        self, number: int, inputs: dict[Value, Array], outputs: dict[Value, Output], accesses: dict[MemoryOp, Touched]
    ) -> None:
        self._number, self._inputs, self._outputs, self._accesses = number, inputs, outputs, accesses
        self._values: dict[Value, Array] = {}

    def run(self, block: Block, args: list[Array]) -> list[Array]:
        """Run a block on its arguments, and return the values that it yields."""
        self._values.update(zip(block.args, args, strict=True))
        for op in block.ops:
            results = [self._pure(op)] if op.pure else self._results(op)
            self._values.update(zip(op.results, results, strict=True))
        return self._all(block.results)

    def _all(self, values: tuple[Value, ...]) -> list[Array]:
        return [self._values[v] for v in values]

    def _pure(self, op: Op) -> Array:
        result, tile = np.asarray(op.evaluate(*self._all(op.operands))), op.result.tile
        is_right = result.shape == tile.shape and result.dtype == tile.dtype
        assert is_right, f"{op.name} evaluates to {TileType(result.shape, result.dtype)}, its type is {tile}"
        return result

    def _results(self, op: Op) -> list[Array]:
        match op:
            case Load():
                return [self._load(op)]
            case WriteOp():
                self._write(op)
            case Print():
                print(op.format.format(*self._all(op.operands)))  # noqa: T201 -- the op prints
            case Assert():
                if not np.all(self._values[op.operands[0]]):
                    with source.at(op.loc):
                        raise DeviceAssertionError(op.message)
            case Fold():
                return self._fold(op)
            case While():
                return self._while(op)
            case Switch():
                chosen = min(max(int(self._values[op.operands[0]]), 0), len(op.regions) - 1)
                return self.run(op.regions[chosen], [])
            case _:
                raise NotImplementedError(op.name)
        return []

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
        flat, touched = self._accesses[op].elements(self._values)
        output = self._outputs.get(op.ref)
        loaded = output.load(flat, self._number, op.loc) if output else self._inputs[op.ref][flat]
        if touched is None:
            return np.asarray(loaded)
        fill = 0 if op.fill is None else self._values[op.fill]
        lanes = np.full(touched.shape, fill, op.ref.ref.dtype)
        lanes[touched] = loaded
        return lanes

    def _write(self, op: WriteOp) -> None:
        flat, touched = self._accesses[op].elements(self._values)
        values = self._values[op.value]
        written, output = values if touched is None else values[touched], self._outputs[op.ref]
        if isinstance(op, Atomic):
            output.update(flat, written, op.kind, self._number, op.loc)
        else:
            output.store(flat, written, self._number, op.loc)
