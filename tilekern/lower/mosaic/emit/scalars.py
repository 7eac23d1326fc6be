"""Values of known scalars, in index maps and in the body of a kernel; scalars that are read from tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilekern.ir.compute import Constant
from tilekern.ir.core import Value
from tilekern.ir.memory import Load
from tilekern.ir.types import BOOL
from tilekern.lower.mosaic.emit.ops import function_of
from tilekern.lower.mosaic.plan.scalars import Scalars, scalar_operands
from tilekern.lower.mosaic.stored_dtypes import as_stored, select_wide, wide_dtype
from tilekern.lower.positions import locate


def evaluate(scalars: Scalars, value: Value, indices: Mapping[Value, Any], tables: Mapping[Value, Any]) -> Any:
    """The value of a known scalar; traceable by JAX.

    Args:
      scalars: the known scalars.
      value: a known scalar.
      indices: the values of the indices.
      tables: the elements of each table, as `flat_table` lays them out.
    """
    value = scalars.canonical(value)
    if value in indices:
        return indices[value]
    op = scalars.definition(value)
    assert op is not None, f"no op computes {value}"
    if isinstance(op, Constant):
        return op.array.reshape(-1)[0]
    operands = {v: evaluate(scalars, v, indices, tables) for v in scalar_operands(op)}
    if isinstance(op, Load):
        return read_table(op, operands, tables[op.ref])
    return function_of(op)(*(jnp.asarray(operands[v]) for v in op.operands))


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
