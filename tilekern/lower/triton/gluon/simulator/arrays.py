"""Arrays in global memory, as descriptors and as pointers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilekern.errors import OutOfBoundsError, UnwrittenError, WriteConflictError
from tilekern.ir.core import Array
from tilekern.lower.triton.gluon.simulator.machine import FaultError, Machine
from tilekern.lower.triton.gluon.simulator.tiles import Tile, elements
from tilekern.lower.triton.program import Descriptor


class GlobalArray:
    """An array.

    Attributes:
      data: its elements, flat.
      writers: for results, the number of the thread block that stored each element, -1 before.
    """

    def __init__(self, name: str, data: Array, is_result: bool) -> None:
        self.name, self.data = name, data.reshape(-1)
        self.writers = np.full(self.data.size, -1) if is_result else None

    def load(self, machine: Machine, places: Array) -> Array:
        """Elements at places in bounds."""
        self._check(machine, places)
        if self.writers is not None:
            machine.fail(f"a load of the result {self.name}")
        return self.data[places]

    def store(self, machine: Machine, places: Array, values: Array) -> None:
        """Store to places in bounds. Programs of a thread block may store the same bits twice."""
        self._check(machine, places)
        if self.writers is None:
            raise FaultError(WriteConflictError(f"a store to the input {self.name}"), machine.line())
        if not places.size:
            return
        before = self.writers[places]
        same = self.data[places].view(np.uint8) == np.ascontiguousarray(values).view(np.uint8)
        same = same.reshape(before.size, -1).all(axis=1).reshape(before.shape)
        if np.any((before >= 0) & ~((before == machine.block) & same)):
            raise FaultError(WriteConflictError(f"an element of {self.name} is stored twice"), machine.line())
        self.data[places], self.writers[places] = values, machine.block

    def check_written(self) -> None:
        """Every element of a result must have been stored."""
        if self.writers is not None and np.any(self.writers < 0):
            missing = int(np.sum(self.writers < 0))
            raise UnwrittenError(f"{missing} elements of {self.name} are never stored")

    def _check(self, machine: Machine, places: Array) -> None:
        if places.size and (places.min() < 0 or places.max() >= self.data.size):
            raise FaultError(OutOfBoundsError(f"an access outside of {self.name}"), machine.line())


class Pointer:
    """Pointers to elements of one array.

    Attributes:
      divided: the dim along which the thread blocks of a cluster divide them; None if each has all.
    """

    def __init__(self, array: GlobalArray, offsets: Any = 0, divided: int | None = None) -> None:
        self.array, self.offsets, self.divided = array, np.asarray(offsets, np.int64), divided

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.array, self.offsets + elements(other))

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.array, self.offsets - elements(other))

    def masked(self, mask: Any) -> tuple[Array, Array]:
        """The offsets, and the lanes that are accessed."""
        lanes = np.broadcast_to(True if mask is None else elements(mask), self.offsets.shape)
        return self.offsets, lanes


class Box:
    """A descriptor: an array and the box that one copy moves."""

    def __init__(self, array: GlobalArray, form: Descriptor) -> None:
        self.array, self.form = array, form
        self.dtype, self.layout = array.data.dtype, form.divided

    def places(self, corner: list[int]) -> tuple[Array, Array]:
        """Offsets of a box's elements, and a mask of the elements in bounds."""
        offsets = np.zeros(self.form.block, np.int64)
        inside = np.ones(self.form.block, bool)
        for dim, (start, size, extent, stride) in enumerate(
            zip(corner, self.form.block, self.form.shape, self.form.strides, strict=True)
        ):
            shape = [1] * len(corner)
            shape[dim] = size
            lanes = (start + np.arange(size)).reshape(shape)
            offsets = offsets + lanes * stride
            inside = inside & (lanes >= 0) & (lanes < extent)
        return offsets, inside

    def read(self, machine: Machine, corner: list[int]) -> Array:
        """A box of the array, 0 outside of it."""
        offsets, inside = self.places(corner)
        values = np.zeros(self.form.block, self.dtype)
        values[inside] = self.array.load(machine, offsets[inside])
        return values

    def write(self, machine: Machine, corner: list[int], values: Array, part: int) -> None:
        """Write a thread block's part of a box, but nothing outside of the array."""
        mine = machine.slice_of(self.form.divided, self.form.block, part)
        offsets, inside = (x[mine] for x in self.places(corner))
        self.array.store(machine, offsets[inside], values[mine][inside])


def loaded(machine: Machine, pointer: Pointer, mask: Any, other: Any) -> Tile:
    """The elements that pointers point to."""
    offsets, lanes = pointer.masked(mask)
    data = pointer.array.data
    with np.errstate(all="ignore"):
        fill = np.full((), np.nan).astype(data.dtype) if other is None else elements(other)
    values = np.full(offsets.shape, fill, data.dtype)
    values[lanes] = pointer.array.load(machine, offsets[lanes])
    return Tile(values)


def stored(machine: Machine, pointer: Pointer, value: Any, mask: Any) -> None:
    """Store elements where pointers point: this thread block's part; the first of a cluster stores undivided tiles."""
    offsets, lanes = pointer.masked(mask)
    part = machine.role.part
    if pointer.divided is None and part:
        return
    mine = np.zeros(offsets.shape, bool)
    mine[machine.slice_of(pointer.divided, offsets.shape, part)] = True
    lanes = lanes & mine
    values = np.broadcast_to(np.asarray(elements(value), pointer.array.data.dtype), offsets.shape)
    pointer.array.store(machine, offsets[lanes], values[lanes])
