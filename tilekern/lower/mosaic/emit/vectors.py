"""Vectors, the values of rank 1, in the two forms that vector registers of 8 sublanes by 128 lanes have for them.

    row      [1, n]    along the lanes, as a vector lies in memory and as it meets the last dim of a tile
    column   [n, 128]  along the sublanes, every lane the same: what a reduction over lanes gives, and what meets the
                       other dim of a tile; with one lane only, every use would repeat it over the lanes first

`Forms` finds in which forms each vector is wanted, so that it is computed in these from the start; turning one into
the other is a transposition.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.shape import Broadcast, Reshape
from tilekern.ir.types import BOOL, TileType
from tilekern.lower.mosaic.chip import LANES
from tilekern.lower.mosaic.storage import as_stored, widened

Form = Literal["row", "column"]


def is_vector(value: Value) -> bool:
    """Whether a value is of rank 1."""
    return isinstance(value.type, TileType) and len(value.type.shape) == 1


def shape_in(form: Form, length: int) -> tuple[int, int]:
    """The shape of a vector in a form."""
    return (1, length) if form == "row" else (length, LANES)


class Forms:
    """The forms in which the vectors of a Func are wanted.

    A value that passes through loops or branches has one form at all places where it is the same.
    """

    def __init__(self, func: Func) -> None:
        self._wanted: dict[Value, set[Form]] = {}
        self._carried: dict[Value, Value] = {}
        ops = list(func.walk())
        for op in ops:
            self._join(op)
        changes = True
        while changes:
            changes = sum(self._visit(op) for op in reversed(ops)) > 0

    def of(self, value: Value) -> tuple[Form, ...]:
        """The forms wanted of a vector; at least one."""
        wanted = self._wanted.get(self._root(value), set[Form]())
        if value in self._carried or not wanted:
            return (self.carried(value),)
        return tuple(sorted(wanted))

    def carried(self, value: Value) -> Form:
        """The one form of a vector that loops or branches yield."""
        return "column" if "column" in self._wanted.get(self._root(value), ()) else "row"

    def _root(self, value: Value) -> Value:
        while value in self._carried and self._carried[value] is not value:
            value = self._carried[value]
        return value

    def _tie(self, values: tuple[Value, ...]) -> None:
        for value in values:
            self._carried.setdefault(value, value)
        first = self._root(values[0])
        for value in values[1:]:
            self._carried[self._root(value)] = first

    def _join(self, op: Op) -> None:
        match op:
            case Fold():
                groups = zip(op.results, op.inits, op.body.args[1:], op.body.results, strict=True)
            case While():
                groups = zip(op.results, op.operands, op.condition.args, op.body.args, op.body.results, strict=True)
            case Switch():
                groups = zip(op.results, *(region.results for region in op.regions), strict=True)
            case _:
                return
        for group in groups:
            if is_vector(group[0]):
                # What comes in from outside is turned where it comes in.
                inside = tuple(v for v in group if v not in op.operands)
                self._tie(inside)

    def _visit(self, op: Op) -> bool:
        changed = False
        for value, form in self._wants(op):
            wanted = self._wanted.setdefault(self._root(value), set[Form]())
            changed |= form not in wanted
            wanted.add(form)
        return changed

    def _wants(self, op: Op) -> list[tuple[Value, Form]]:
        vectors = [v for v in op.operands if is_vector(v)]
        match op:
            case Broadcast(operands=(x,)) if is_vector(x) and len(op.shape) > 1:
                return [(x, "row" if op.dims == (len(op.shape) - 1,) else "column")]
            case Reshape(operands=(x,)) if is_vector(x):
                return [(x, "column" if op.shape[-1:] == (1,) and op.shape != (1, 1) else "row")]
            case Fold() | While():
                inits = op.inits if isinstance(op, Fold) else op.operands
                pairs = zip(inits, op.results, strict=True)
                return [(i, self.carried(r)) for i, r in pairs if is_vector(i)]
            case _ if op.pure and op.results and is_vector(op.results[0]):
                return [(v, form) for v in vectors for form in self._wanted.get(self._root(op.results[0]), ())]
            case _:
                return [(v, "row") for v in vectors]


def turned(array: Any, form: Form) -> Any:
    """A vector given in one form, in the other one: `form`."""
    wide = as_stored(array).astype(widened(array.dtype))
    found = jnp.broadcast_to(wide, (LANES, wide.shape[1])).T if form == "column" else wide.T[:1]
    return found != 0 if array.dtype == BOOL else found.astype(array.dtype)


def to_tile(column: Any, width: int) -> Any:
    """A column as a tile of `width` equal lanes."""
    if column.dtype == BOOL:
        return to_tile(as_stored(column), width) != 0
    whole = -(-width // LANES)
    tile = column if whole == 1 else jnp.concatenate([column] * whole, axis=1)
    return tile if tile.shape[1] == width else tile[:, :width]
