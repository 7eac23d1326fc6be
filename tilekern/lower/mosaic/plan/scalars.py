"""Scalars that are known outside of a kernel's body: where index maps, loop bounds and tables come from.

A scalar is *known* if it is computed from grid indices, constants and scalars loaded from small arrays, which Pallas
prefetches into scalar memory before the first program runs. Two known scalars that are computed in the same way are
one; that is how accesses in several loops over one axis are seen to read the same blocks.
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
from tilekern.lower.mosaic.storage import as_stored, choose, widened
from tilekern.lower.positions import locate


class Scalars:
    """The scalars of a Func.

    Args:
      func: a legal Func.
      table_bytes: how much scalar memory arrays may take.

    Attributes:
      tables: the inputs that are read as scalars only, and are small enough for scalar memory.
    """

    def __init__(self, func: Func, table_bytes: int) -> None:
        self._definitions = definitions(func)
        self._grid = {arg: n for n, arg in enumerate(func.body.args)}
        self._counters: dict[Value, Value] = {}
        self._keys: dict[Value, Hashable | None] = {}
        self.tables = _tables(func, table_bytes)

    def count(self, index: Value, as_index: Value | None = None) -> None:
        """From here on the index of a loop is known: it became an axis of the grid, that of `as_index` if given."""
        self._counters[index] = as_index or index
        self._keys.clear()

    def canonical(self, value: Value) -> Value:
        """The index that stands for one of a loop in the grid; any other value itself."""
        return self._counters.get(value, value)

    def key(self, value: Value) -> Hashable | None:
        """What a known scalar is computed from, equal for equal ones; None for all others."""
        if value not in self._keys:
            self._keys[value] = self._key(value)
        return self._keys[value]

    def position_key(self, position: Position, operands: Sequence[Value]) -> Hashable | None:
        """The same for a position."""
        keys = [self.key(operands[t.operand]) for t in position.terms]
        if None in keys:
            return None
        terms = zip(keys, position.terms, strict=True)
        return position.const, tuple((key, t.stride, t.div, t.mod) for key, t in terms)

    def axes(self, value: Value) -> frozenset[Value]:
        """The grid indices, and indices of loops in the grid, that a known scalar depends on."""
        if value in self._grid or value in self._counters:
            return frozenset([self.canonical(value)])
        op = self._definitions[value]
        return frozenset[Value]().union(*(self.axes(v) for v in _scalar_operands(op)))

    def reads(self, value: Value) -> bool:
        """Whether a known scalar depends on an array."""
        op = self._definitions.get(value)
        return op is not None and (isinstance(op, Load) or any(self.reads(v) for v in _scalar_operands(op)))

    def evaluate(self, value: Value, given: Mapping[Value, Any], tables: Mapping[Value, Any]) -> Any:
        """A known scalar.

        Args:
          value: the scalar.
          given: the indices.
          tables: what holds the elements of each table, see `flat_table`.
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

    def beforehand(self, value: Value, given: Mapping[Value, Any]) -> Array:
        """A known scalar that reads no array, on NumPy; `given` indices may be arrays of many of them."""
        value = self.canonical(value)
        if value in given:
            return np.asarray(given[value])
        op = self._definitions[value]
        return np.asarray(op.evaluate(*np.broadcast_arrays(*(self.beforehand(v, given) for v in op.operands))))

    def _key(self, value: Value) -> Hashable | None:
        if value in self._grid or value in self._counters:
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
    """The arrays for scalar memory, as many as fit, in order."""
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
    """An array as scalar memory holds it: one-dimensional, of 32 bits, not empty."""
    flat = jnp.reshape(array, -1).astype(widened(param.ref.dtype))
    return flat if flat.size else jnp.zeros(1, flat.dtype)


def read_table(op: Load, operands: Mapping[Value, Any], table: Any) -> Any:
    """A scalar from a table: its fill where it is out of bounds."""
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
        number = choose(inside, number, as_stored(jnp.asarray(fill)))
    return number != 0 if dtype == BOOL else number
