"""Forms of vectors, the values of rank 1, in registers of 8 sublanes by 128 lanes.

    row      [1, n]    along the lanes: as memory holds a vector, and as it meets the last dim of a tile
    column   [n, 128]  along the sublanes, all lanes equal: the result of a reduction over lanes, and the operand that
                       meets the other dim of a tile; with a single lane, each use would repeat it over the lanes first

`VectorForms` finds the forms in which each vector is used, so that the vector is computed in these forms from the
start. A conversion between forms is a transposition.
"""

from __future__ import annotations

from typing import Literal

from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.shape import Broadcast, Reshape
from tilekern.ir.types import TileType
from tilekern.lower.mosaic.chip import LANES
from tilekern.lower.mosaic.plan.continued_carries import continued_carries

Form = Literal["row", "column"]


def is_vector(value: Value) -> bool:
    """True if a value has rank 1."""
    return isinstance(value.type, TileType) and len(value.type.shape) == 1


def shape_in(form: Form, length: int) -> tuple[int, int]:
    """The shape of a vector in a form."""
    return (1, length) if form == "row" else (length, LANES)


class VectorForms:
    """The forms in which the vectors of a Func are used.

    A vector that loops carry or branches yield has one form throughout, also in a loop that continues its carry.
    """

    def __init__(self, func: Func) -> None:
        self._forms: dict[Value, set[Form]] = {}
        self._carried: dict[Value, Value] = {}
        self._continued = continued_carries(func)
        ops = list(func.walk())
        for op in ops:
            self._join(op)
        changes = True
        while changes:
            changes = sum(self._visit(op) for op in reversed(ops)) > 0

    def of(self, value: Value) -> tuple[Form, ...]:
        """The forms in which a vector is computed; at least one."""
        forms = self._forms.get(self._root(value), set[Form]())
        if value in self._carried or not forms:
            return (self.carried(value),)
        return tuple(sorted(forms))

    def carried(self, value: Value) -> Form:
        """The single form of a vector that loops or branches yield: a column if any use is one."""
        return "column" if "column" in self._forms.get(self._root(value), ()) else "row"

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
                # Other initial values are converted where they enter the loop.
                inside = tuple(v for v in group if v not in op.operands or v in self._continued)
                self._tie(inside)

    def _visit(self, op: Op) -> bool:
        changed = False
        for value, form in self._wants(op):
            forms = self._forms.setdefault(self._root(value), set[Form]())
            changed |= form not in forms
            forms.add(form)
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
                return [(v, form) for v in vectors for form in self._forms.get(self._root(op.results[0]), ())]
            case _:
                return [(v, "row") for v in vectors]
