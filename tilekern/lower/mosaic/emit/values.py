"""Values of a program while its ops are emitted: their arrays, vectors in one or two forms, and pure ops on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.compute import Bitcast, Constant, Convert, Reduce, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.shape import Broadcast, Iota, Reshape
from tilekern.ir.types import BOOL
from tilekern.lower.mosaic.emit.ops import function_of
from tilekern.lower.mosaic.emit.tile_shapes import with_shape
from tilekern.lower.mosaic.emit.vectors import repeat_column, to_form
from tilekern.lower.mosaic.plan.vector_forms import Form, VectorForms, is_vector, shape_in
from tilekern.lower.mosaic.stored_dtypes import as_stored, select_wide, wide_dtype


class Values:
    """The arrays of the values emitted so far.

    Args:
      forms: the forms of vectors.
      scalars: the arrays of the scalars that are set from the start.
      interpreted: True if Pallas interprets the kernel.
    """

    def __init__(self, forms: VectorForms, scalars: Mapping[Value, Any], interpreted: bool) -> None:
        self._forms, self._interpreted = forms, interpreted
        self._env: dict[Value, Any] = dict(scalars)
        self._vectors: dict[Value, dict[Form, Any]] = {}

    def scalar(self, value: Value) -> Any:
        """The array of a scalar or tile."""
        return self._env[value]

    def row(self, value: Value) -> Any:
        """The array of a vector in row form."""
        return self.get(value, "row")

    def plain(self, value: Value) -> Any:
        """The array of a value in its shape of the IR."""
        return self.get(value, "row").reshape(-1) if is_vector(value) else self._env[value]

    def get(self, value: Value, form: Form | None = None) -> Any:
        """The array of a value; a vector in `form`, or in any form if `form` is None."""
        if not is_vector(value):
            return self._env[value]
        forms = self._vectors[value]
        if form is None:
            form = next(iter(forms))
        if form not in forms:
            (vector,) = forms.values()
            return to_form(vector, form)
        return forms[form]

    def set(self, value: Value, array: Any, form: Form = "row") -> None:
        """Set the array of a value; a vector is converted to the forms in which it is used."""
        if not is_vector(value):
            self._env[value] = array
            return
        forms = self._forms.of(value)
        self._vectors[value] = {f: array if f == form else to_form(array, f) for f in forms}

    def carried(self, value: Value) -> Form:
        """The form of a carry; "row" if it is no vector."""
        return self._forms.carried(value) if is_vector(value) else "row"

    def as_carry(self, value: Value, carry: Value) -> Any:
        """A value in the representation of a carry: a vector in one form, a bool as int32, a scalar in 32 bits."""
        array = jnp.asarray(as_stored(self.get(value, self.carried(carry))))
        return array if array.shape else array.astype(wide_dtype(value.tile.dtype))

    def compute(self, op: Op) -> None:
        """Set the result of a pure op."""
        result = op.result
        if is_vector(result):
            self._vectors[result] = {form: self._vector(op, form) for form in self._forms.of(result)}
        elif len(op.operands) == 1 and is_vector(op.operands[0]):
            self._env[result] = self._from_vector(op)
        elif isinstance(op, Constant):
            number = op.array.reshape(-1)[0] if op.array.size else np.zeros((), op.array.dtype)
            self._env[result] = jnp.full(op.shape, number, op.array.dtype)
        elif isinstance(op, Elementwise) and not result.tile.shape and op.operands[0].tile.dtype.itemsize < 4:
            # Mosaic has no narrow scalar arithmetic. In float32 and int32 the results are the same after the cast.
            dtype = op.operands[0].tile.dtype
            wide = dtype if dtype == BOOL else wide_dtype(dtype)
            number = function_of(op)(*(self._env[v].astype(wide) for v in op.operands))
            self._env[result] = number.astype(result.tile.dtype)
        elif isinstance(op, Select) and not result.tile.shape:
            mask, x, y = (self._env[v] for v in op.operands)
            self._env[result] = select_wide(mask, as_stored(x), as_stored(y)).astype(result.tile.dtype)
        else:
            self._env[result] = function_of(op, self._interpreted)(*map(self.plain, op.operands))

    def _vector(self, op: Op, form: Form) -> Any:
        """The result of an op that is a vector, computed in one form."""
        shape = shape_in(form, op.result.tile.shape[0])
        match op:
            case Constant():
                return jnp.full(shape, op.array.reshape(-1)[0] if op.array.size else 0, op.array.dtype)
            case Iota():
                return lax.broadcasted_iota(op.dtype, shape, 1 if form == "row" else 0)
            case Broadcast(operands=(x,)):
                return jnp.full(shape, self._env[x] if not is_vector(x) else self.get(x, "row")[0, 0])
            case Reshape(operands=(x,)):
                return self._in_form(self._env[x], form, shape)
            case Reduce(operands=(x,)) if len(x.tile.shape) == 2:
                return self._in_form(function_of(op)(self._env[x], keepdims=True), form, shape)
            case Elementwise() | Select() | Convert() | Bitcast():
                return function_of(op)(*(self.get(v, form) for v in op.operands))
            case _:
                return self._in_form(function_of(op)(*map(self.plain, op.operands)), form, shape)

    def _in_form(self, tile: Any, form: Form, shape: tuple[int, int]) -> Any:
        """A vector in the given form, from a tile [1, n] or [n, 1], or from an array [n]."""
        if tile.ndim == 2 and tile.shape[1] == 1:
            column = jnp.broadcast_to(tile, (tile.shape[0], shape_in("column", 1)[1]))
            return column if form == "column" else to_form(column, "row")
        row = tile.reshape(1, -1)
        return row if form == "row" else to_form(row, "column")

    def _from_vector(self, op: Op) -> Any:
        """The result of an op whose only operand is a vector."""
        (x,) = op.operands
        shape = op.result.tile.shape
        match op:
            case Broadcast():
                return self._broadcast(x, shape, op.dims[0])
            case Reshape() if len(shape) == 2 and shape[1] == 1:
                return self.get(x, "column")[:, :1]
            case Reshape():
                return with_shape(self.get(x, "row"), shape)
            case _:
                return function_of(op)(self.plain(x))

    def _broadcast(self, x: Value, shape: tuple[int, ...], dim: int) -> Any:
        if dim == len(shape) - 1:
            row = self.get(x, "row")
            return _spread(row.reshape((1,) * (len(shape) - 1) + row.shape[1:]), shape)
        column = self.get(x, "column")
        if len(shape) == 2:
            return repeat_column(column, shape[1]) if column.shape[0] == shape[0] else _spread(column[:, :1], shape)
        column_shape = [1] * len(shape)
        column_shape[dim] = column.shape[0]
        return _spread(column[:, :1].reshape(column_shape), shape)


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    spread = jnp.broadcast_to(as_stored(x), shape)
    return spread != 0 if x.dtype == BOOL else spread


def from_carry(array: Any, value: Value) -> Any:
    """The array of a value, from its representation as a carry."""
    dtype = value.tile.dtype
    if dtype == BOOL:
        return array != 0
    return array if array.dtype == dtype else array.astype(dtype)
