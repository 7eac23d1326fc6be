"""The elements that an access touches, by the values of its positions and its mask."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from tilekern import source
from tilekern.errors import OutOfBoundsError
from tilekern.ir.core import Array, Value
from tilekern.ir.memory import Dim, MemoryOp
from tilekern.ir.types import BOOL


class Touched:
    """An access whose parts that depend on no value are computed once, for all its runs."""

    def __init__(self, op: MemoryOp, valid: Mapping[int, Value]) -> None:
        """`valid` maps the number of a dim to the lanes of its index vector that come from inside of arrays."""
        self._op, self._valid, access, extents = op, valid, op.access, op.extents
        self.shape = access.shape
        self._terms = [[(op.positions[t.operand], t) for t in dim.position.terms] for dim in access.dims]
        # The lanes of each dim from its position on, in the shape in which they broadcast to the tile.
        self._along = [
            tuple(dim.size if n == lane else 1 for n in range(len(self.shape)))
            for dim, lane in zip(access.dims, access.lanes, strict=True)
        ]
        self._strides = [prod(extents[n + 1 :]) for n in range(len(extents))]
        self._by_scalars = all(dim.kind in ("block", "index") for dim in access.dims)
        self._offsets = np.zeros(self.shape, np.int64)
        if self._by_scalars:
            for dim, along, stride in zip(access.dims, self._along, self._strides, strict=True):
                self._offsets += (np.arange(dim.size) * stride).reshape(along)

    def elements(self, values: Mapping[Value, Array]) -> tuple[Array, Array | None]:
        """The flat indices of the touched lanes, and a bool array that marks the lanes; None if all lanes are touched.

        Raises:
          OutOfBoundsError: a dim proved in bounds has a lane outside, or an element is touched at a position that
            was read outside of an array.
        """
        if self._by_scalars and (first := self._whole(values)) is not None:
            flat = np.asarray(self._offsets + first)
            if self._op.mask is None:
                return flat, None
            touched = values[self._op.mask]
            return flat[touched], touched
        return self._some(values)

    def _whole(self, values: Mapping[Value, Array]) -> int | None:
        """The flat index of the first lane, if every lane is in bounds."""
        first = 0
        dims = zip(self._op.access.dims, self._terms, self._op.extents, self._strides, strict=True)
        for dim, terms, length, stride in dims:
            position = dim.position.const + sum(t.stride * t.digit(int(values[v])) for v, t in terms)
            if not 0 <= position <= length - dim.size:
                return None
            first += position * stride
        return first

    def _some(self, values: Mapping[Value, Array]) -> tuple[Array, Array]:
        """The flat indices of the touched lanes, and the bool array that marks them, for any positions."""
        op = self._op
        flat, touched = np.zeros(self.shape, np.int64), np.ones(self.shape, BOOL)
        for number, (dim, length, along) in enumerate(zip(op.access.dims, op.extents, self._along, strict=True)):
            indices = self._indices(number, dim, values)
            inside = (indices >= 0) & (indices < length)
            if dim.in_bounds and not inside.all():
                with source.at(op.loc):
                    raise OutOfBoundsError(
                        f"a lane of dim {number} of {op.ref.name}, proved in bounds, is not",
                        expected=f"0 <= index < {length}",
                        got=f"index={np.extract(~inside, indices)[0]}",
                        fix="please report it, if the compiler made the proof",
                    )
            flat = flat * length + np.where(inside, indices, 0).reshape(along)
            touched = touched & inside.reshape(along)
        if op.mask is not None:
            touched = touched & values[op.mask]
        for number, valid in self._valid.items():
            self._check_valid(number, touched & ~values[valid].reshape(self._along[number]))
        return flat[touched], touched

    def _check_valid(self, number: int, invalid: Array) -> None:
        if invalid.any():
            lane = [int(n) for n in np.argwhere(invalid)[0]]
            with source.at(self._op.loc):
                raise OutOfBoundsError(
                    f"a lane of dim {number} of {self._op.ref.name} is at a position that was read outside of an array",
                    expected="an index vector that is -1, or a mask that is False, in the lanes of a tail",
                    got=f"lane={lane}",
                    fix="load the index vector with a fill of -1, or mask the write",
                )

    def _indices(self, number: int, dim: Dim, values: Mapping[Value, Array]) -> Array:
        """The index of each lane along one dim; positions never wrap."""
        position = np.asarray(dim.position.const, np.int64)
        for value, term in self._terms[number]:
            position = position + term.stride * term.digit(values[value].astype(np.int64))
        return position + np.arange(dim.size) if dim.kind == "block" else position
