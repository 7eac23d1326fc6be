"""Known scalars: the scalars that index maps can compute.

A scalar is *known* if it is computed from grid indices, constants and scalars loaded from small arrays, which Pallas
prefetches into scalar memory before the first program runs. Two known scalars with the same computation have the same
key. So accesses in several loops over one axis turn out to read the same blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.core import Array, Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp, Position
from tilekern.ir.types import I32, TileType
from tilekern.lower.mosaic.chip import padded_bytes


class Scalars:
    """The known scalars of a Func.

    Args:
      func: a legal Func.
      table_bytes: the bytes of scalar memory that arrays may take.

    Attributes:
      tables: the inputs that are read as scalars only, as far as they fit scalar memory.
    """

    def __init__(self, func: Func, table_bytes: int) -> None:
        self._definitions = definitions(func)
        self._grid = {arg: n for n, arg in enumerate(func.body.args)}
        self._loop_indices: dict[Value, Value] = {}
        self._keys: dict[Value, Hashable | None] = {}
        self.tables = _tables(func, table_bytes)

    def add_loop_index(self, index: Value, as_index: Value | None = None) -> None:
        """Make the index of a loop known, for the loop is stepped by the grid or by a pipeline.

        Args:
          index: the index.
          as_index: the index of another loop whose steps are the steps of this loop.
        """
        self._loop_indices[index] = as_index or index
        self._keys.clear()

    def canonical(self, value: Value) -> Value:
        """The index that stands for a loop's index; the value if it is no loop's index."""
        return self._loop_indices.get(value, value)

    def definition(self, value: Value) -> Op | None:
        """The op that computes a value; None for an argument of a block."""
        return self._definitions.get(value)

    def key(self, value: Value) -> Hashable | None:
        """The computation of a known scalar, as a hashable key; None for an unknown scalar."""
        if value not in self._keys:
            self._keys[value] = self._key(value)
        return self._keys[value]

    def position_key(self, position: Position, operands: Sequence[Value]) -> Hashable | None:
        """The computation of a position, as a hashable key; None if an operand is unknown."""
        keys = [self.key(operands[t.operand]) for t in position.terms]
        if None in keys:
            return None
        terms = zip(keys, position.terms, strict=True)
        return position.const, tuple((key, t.stride, t.div, t.mod) for key, t in terms)

    def axes(self, value: Value) -> frozenset[Value]:
        """The indices, of the grid and of stepped loops, that a known scalar depends on."""
        if value in self._grid or value in self._loop_indices:
            return frozenset([self.canonical(value)])
        op = self._definitions[value]
        return frozenset[Value]().union(*(self.axes(v) for v in scalar_operands(op)))

    def reads_array(self, value: Value) -> bool:
        """True if a known scalar depends on an array."""
        op = self._definitions.get(value)
        return op is not None and (isinstance(op, Load) or any(self.reads_array(v) for v in scalar_operands(op)))

    def evaluate_numpy(self, value: Value, indices: Mapping[Value, Any]) -> Array:
        """The value of a known scalar that reads no array, by NumPy; arrays of indices give an array of values."""
        value = self.canonical(value)
        if value in indices:
            return np.asarray(indices[value])
        op = self._definitions[value]
        return np.asarray(op.evaluate(*np.broadcast_arrays(*(self.evaluate_numpy(v, indices) for v in op.operands))))

    def _key(self, value: Value) -> Hashable | None:
        if value in self._grid or value in self._loop_indices:
            return ("index", self.canonical(value))
        op = self._definitions.get(value)
        if op is None or value.type != TileType((), value.tile.dtype):
            return None
        if isinstance(op, Constant):
            return ("constant", str(op.array.dtype), op.array.reshape(-1)[:1].tobytes())
        if isinstance(op, Load):
            return self._load_key(op)
        if not isinstance(op, Elementwise | Select | Convert):
            return None
        keys = tuple(self.key(v) for v in op.operands)
        attribute = getattr(op, "function", "") or str(getattr(op, "dtype", ""))
        return None if None in keys else (op.name, attribute, keys)

    def _load_key(self, op: Load) -> Hashable | None:
        if op.ref not in self.tables or op.masked:
            return None
        positions = tuple(self.position_key(d.position, op.positions) for d in op.access.dims)
        fill = None if op.fill is None else self.key(op.fill)
        if None in positions or (op.fill is not None and fill is None):
            return None
        return ("load", op.ref, positions, fill)


def scalar_operands(op: Op) -> tuple[Value, ...]:
    """The operands of an op that computes a known scalar, the array of a load left out."""
    if not isinstance(op, Load):
        return op.operands
    return (*op.positions, *(() if op.fill is None else (op.fill,)))


def _tables(func: Func, limit: int) -> tuple[Value, ...]:
    """The inputs that are read as scalars only, in order, until scalar memory is full."""
    scalar_only: dict[Value, bool] = {}
    for op in func.walk():
        if isinstance(op, MemoryOp):
            scalar = isinstance(op, Load) and op.access.shape == ()
            scalar_only[op.ref] = scalar_only.get(op.ref, True) and scalar
    tables: list[Value] = []
    for param in func.inputs:
        size = padded_bytes((max(1, prod(param.ref.shape)),), I32)
        if param.ref.role == "in" and scalar_only.get(param) and size <= limit:
            tables.append(param)
            limit -= size
    return tuple(tables)
