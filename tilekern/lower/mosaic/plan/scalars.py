"""Known scalars: those that index maps can compute.

A scalar is *known* if it is computed from grid indices, constants and scalars loaded from small arrays, which Pallas
prefetches into scalar memory before the first program runs. Two known scalars with the same computation have the same
key. So accesses in several loops over one axis turn out to read the same blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.core import Array, Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp, Position
from tilekern.ir.types import BOOL, I32, TileType
from tilekern.lower.mosaic.chip import padded_bytes
from tilekern.lower.mosaic.emit.ops import function_of
from tilekern.lower.mosaic.stored_dtypes import as_stored, select_wide, wide_dtype
from tilekern.lower.positions import locate


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
          as_index: the index of another loop that is stepped along with this one.
        """
        self._loop_indices[index] = as_index or index
        self._keys.clear()

    def canonical(self, value: Value) -> Value:
        """The index that stands for a loop's index; another value stands for itself."""
        return self._loop_indices.get(value, value)

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
        return frozenset[Value]().union(*(self.axes(v) for v in _scalar_operands(op)))

    def reads_array(self, value: Value) -> bool:
        """True if a known scalar depends on an array."""
        op = self._definitions.get(value)
        return op is not None and (isinstance(op, Load) or any(self.reads_array(v) for v in _scalar_operands(op)))

    def evaluate(self, value: Value, given: Mapping[Value, Any], tables: Mapping[Value, Any]) -> Any:
        """The value of a known scalar; traceable by JAX.

        Args:
          value: the scalar.
          given: the values of the indices.
          tables: the elements of each table, as `flat_table` lays them out.
        """
        value = self.canonical(value)
        if value in given:
            return given[value]
        op = self._definitions[value]
        if isinstance(op, Constant):
            return op.array.reshape(-1)[0]
        operands = {v: self.evaluate(v, given, tables) for v in _scalar_operands(op)}
        if isinstance(op, Load):
            return read_table(op, operands, tables[op.ref])
        return function_of(op)(*(jnp.asarray(operands[v]) for v in op.operands))

    def evaluate_numpy(self, value: Value, given: Mapping[Value, Any]) -> Array:
        """The value of a known scalar that reads no array, by NumPy; the `given` indices may be arrays."""
        value = self.canonical(value)
        if value in given:
            return np.asarray(given[value])
        op = self._definitions[value]
        return np.asarray(op.evaluate(*np.broadcast_arrays(*(self.evaluate_numpy(v, given) for v in op.operands))))

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


def _scalar_operands(op: Op) -> tuple[Value, ...]:
    if not isinstance(op, Load):
        return op.operands
    return (*op.positions, *(() if op.fill is None else (op.fill,)))


def _tables(func: Func, limit: int) -> tuple[Value, ...]:
    """The inputs that are read as scalars only, in order, until scalar memory is full."""
    touched: dict[Value, bool] = {}
    for op in func.walk():
        if isinstance(op, MemoryOp):
            scalar = isinstance(op, Load) and op.access.shape == ()
            touched[op.ref] = touched.get(op.ref, True) and scalar
    found: list[Value] = []
    for param in func.inputs:
        size = padded_bytes((max(1, prod(param.ref.shape)),), I32)
        if param.ref.role == "in" and touched.get(param) and size <= limit:
            found.append(param)
            limit -= size
    return tuple(found)


def flat_table(param: Value, array: Any) -> Any:
    """An array as scalar memory holds it: one-dimensional, 32 bits an element, not empty."""
    flat = jnp.reshape(array, -1).astype(wide_dtype(param.ref.dtype))
    return flat if flat.size else jnp.zeros(1, flat.dtype)


def read_table(op: Load, operands: Mapping[Value, Any], table: Any) -> Any:
    """The scalar that a load reads from a table; its fill if it is out of bounds."""
    shape, dtype = op.ref.ref.shape, op.result.tile.dtype
    fill: Any = np.zeros((), dtype) if op.fill is None else operands[op.fill]
    flat, inside = np.int32(0), None
    for dim, length in zip(op.access.dims, shape, strict=True):
        place = locate(dim.position, [operands[v] for v in op.positions], None)
        if not dim.in_bounds:
            ok = (place >= 0) & (place < length)
            inside = ok if inside is None else inside & ok
            place = jnp.clip(place, 0, max(length - 1, 0))
        flat = flat * np.int32(length) + place
    number = jnp.asarray(table[flat])
    if dtype != BOOL:
        number = number.astype(dtype)
    if inside is not None:
        number = select_wide(inside, number, as_stored(jnp.asarray(fill)))
    return number != 0 if dtype == BOOL else number
