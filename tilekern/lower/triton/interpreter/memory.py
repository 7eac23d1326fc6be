"""The memory of a launch: buffers at addresses far from each other, and a check of every access.

Triton's interpreter (3.6.0, 3.9.0) reads and writes the process' own memory at any pointer, and has no atomic
operations on 16-bit floats. Here addresses are made up, and a lane outside the buffers is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from tilekern.errors import OutOfBoundsError, UnwrittenError, WriteConflictError
from tilekern.ir.core import Array
from tilekern.ir.types import BOOL, DType, kind_of

_SPACING = 40
"""log2 of the bytes from one buffer to the next: no wrong int32 index reaches another buffer."""
_NOBODY = -1

type _Access = Literal["stored", "loaded", "updated"]

_BEHIND: Mapping[_Access, Sequence[_Access]] = {
    "loaded": ("stored", "updated"),
    "stored": ("stored", "updated", "loaded"),
    "updated": ("stored", "loaded"),
}
"""The accesses of an element in whose order an access is seen; updates of one kind may come in any order."""


def poison(shape: tuple[int, ...], dtype: DType) -> Array:
    """The content of uninitialised memory: NaN for floats, an odd bit pattern for integers."""
    if kind_of(dtype) == "float":
        return np.full(shape, np.nan, dtype)
    if dtype == BOOL:
        return np.full(shape, True)
    return np.full(shape, np.frombuffer(b"\xa5" * dtype.itemsize, dtype)[0])


class Buffer:
    """One array in memory.

    Attributes:
      name: name of the argument that points to it.
      base: address of the first element.
      data: the array, flattened.
      owner: for each element, the program that has stored it; None for a buffer that programs only read.
      stored, loaded, updated: for each element of a buffer that programs write, the phase of its last store, load and
        atomic update.
      lane: the lane that has loaded it last.
      fresh: True if the buffer is uninitialised before the launch.
    """

    def __init__(self, name: str, number: int, data: Array, *, written: bool = False, fresh: bool = False) -> None:
        self.name, self.data, self.fresh = name, data.reshape(-1), fresh
        self.base = (number << _SPACING) + (1 << _SPACING - 1)  # the middle of the buffer's range of addresses
        self.owner = np.full(data.size, _NOBODY, np.int32) if written else None
        size = data.size if written else 0
        self.stored, self.loaded, self.updated, self.lane = (np.full(size, _NOBODY, np.int32) for _ in range(4))

    def view(self, dtype: DType) -> Array:
        """The memory as elements of another dtype."""
        whole = self.data.nbytes // dtype.itemsize * dtype.itemsize
        return self.data.view(np.uint8)[:whole].view(dtype)

    def check_written(self) -> None:
        """Raise `UnwrittenError` if no program has stored an element of a fresh buffer."""
        if self.fresh and self.owner is not None and (missing := np.flatnonzero(self.owner == _NOBODY)).size:
            count = f"{missing.size} of {self.owner.size} elements left out"
            expected = "every element of a result stored"
            raise UnwrittenError(f"element {missing[0]} of {self.name} is never stored", expected=expected, got=count)


class Memory:
    """All buffers of a launch.

    Attributes:
      program: number of the program that runs.
      phase: number of the part of a program between two barriers, counted over all programs. In one phase, any thread
        of the program may make an access before any other access.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self.program = self.phase = 0

    def begin(self, program: int) -> None:
        """Start a program."""
        self.program = program
        self.phase += 1

    def add(self, name: str, data: Array, *, written: bool = False, fresh: bool = False) -> Buffer:
        """Put an array into memory; it is copied if programs write to it."""
        # The first addresses stay free, so a null pointer is out of bounds.
        number = len(self._buffers) + 1
        buffer = Buffer(name, number, data.copy() if written else data, written=written, fresh=fresh)
        self._buffers.append(buffer)
        return buffer

    def load(self, pointers: Array, mask: Array | None, fill: Array | None, dtype: DType) -> Array:
        """Load the elements at `pointers`. Masked lanes get `fill`, or poison; on a GPU they are undefined."""
        active = None if mask is None or mask.all() else mask
        place = self._find(pointers, active, dtype, "a load")
        if place is None:
            loaded = np.zeros(0, dtype)
        else:
            buffer, elements = place
            loaded = buffer.view(dtype)[elements]
            if buffer.owner is not None:
                # Another program's store may come before or after this load.
                owner = self._owner(buffer, dtype)[elements]
                foreign = (owner != self.program) & (owner != _NOBODY)
                if foreign.any():
                    loaded = np.where(foreign, poison((), dtype), loaded)
                self._check_order(buffer, elements, _numbers(pointers, active), "loaded")
        if active is None:
            return np.reshape(loaded, pointers.shape)
        if fill is None:
            # For scalars, Triton's language (3.6.0, 3.9.0) drops an `other` that is 0.
            lanes = poison(pointers.shape, dtype) if pointers.size > 1 else np.zeros(pointers.shape, dtype)
        else:
            lanes = np.broadcast_to(fill, pointers.shape).astype(dtype)
        lanes[active] = loaded
        return lanes

    def store(self, pointers: Array, values: Array, mask: Array | None) -> None:
        """Store values where the mask is True."""
        active = None if mask is None or mask.all() else mask
        place = self._find(pointers, active, values.dtype, "a store")
        if place is None:
            return
        buffer, elements = place
        self._claim(buffer, elements, values.dtype)
        self._check_order(buffer, elements, _numbers(pointers, active), "stored")
        buffer.view(values.dtype)[elements] = _lanes(np.broadcast_to(values, pointers.shape), active)

    def update(
        self, pointers: Array, mask: Array | None, function: Callable[..., Array], value: Array, *more: Array
    ) -> Array:
        """Replace elements by `function(old, value, *more)`, lane by lane, and return the old elements."""
        active = None if mask is None or mask.all() else mask
        results = poison(pointers.shape, value.dtype)
        place = self._find(pointers, active, value.dtype, "an update")
        if place is None:
            return results
        buffer, elements = place
        self._owner(buffer, value.dtype)[elements] = self.program
        self._check_order(buffer, elements, _numbers(pointers, active), "updated")
        data = buffer.view(value.dtype)
        operands = [_lanes(np.broadcast_to(v, pointers.shape), active) for v in (value, *more)]
        if np.unique(elements).size == elements.size:
            old = data[elements]
            data[elements] = function(old, *operands)
        else:
            old = np.empty_like(operands[0])
            for lane, element in enumerate(elements):
                old[lane] = data[element]
                data[element] = function(data[element], *(v[lane] for v in operands))
        results[np.ones(pointers.shape, BOOL) if active is None else active] = old
        return results

    def _find(self, pointers: Array, active: Array | None, dtype: DType, access: str) -> tuple[Buffer, Array] | None:
        """The buffer that the active lanes point to, and the element of each lane; None without active lanes.

        Raises:
          OutOfBoundsError: a lane is outside the buffer of the first lane.
        """
        addresses = _lanes(pointers, active).view(np.int64)
        if not addresses.size:
            return None
        number = (int(addresses[0]) >> _SPACING) - 1
        if not 0 <= number < len(self._buffers):
            raise OutOfBoundsError(f"{access} through a pointer to no array", got=f"address={int(addresses[0]):#x}")
        buffer = self._buffers[number]
        offsets = addresses - buffer.base
        last = buffer.data.nbytes - dtype.itemsize
        if offsets.min() < 0 or offsets.max() > last or (offsets & dtype.itemsize - 1).any():
            self._raise_outside(buffer, pointers, active, dtype, access)
        return buffer, offsets // dtype.itemsize

    def _raise_outside(self, buffer: Buffer, pointers: Array, active: Array | None, dtype: DType, access: str) -> None:
        offsets = pointers.view(np.int64) - buffer.base
        size = dtype.itemsize
        wrong = (offsets < 0) | (offsets > buffer.data.nbytes - size) | (offsets % size != 0)
        wrong &= True if active is None else active
        lane = np.unravel_index(int(wrong.argmax()), wrong.shape)
        count = buffer.data.nbytes // size
        got = (
            f"element={offsets[lane] / size:.10g} in lane {list(map(int, lane))}, the first of {wrong.sum()} wrong ones"
        )
        raise OutOfBoundsError(f"{access} is outside {buffer.name}", expected=f"0 <= element < {count}", got=got)

    def _claim(self, buffer: Buffer, elements: Array, dtype: DType) -> None:
        """Mark elements as stored by this program; raise `WriteConflictError` if another program has stored any."""
        owners = self._owner(buffer, dtype)
        owner = owners[elements]
        foreign = (owner != self.program) & (owner != _NOBODY)
        if foreign.any():
            element, earlier = elements[foreign][0], owner[foreign][0]
            got = f"program {self.program}, and program {earlier} before it"
            raise WriteConflictError(f"two programs store element {element} of {buffer.name}", got=got)
        owners[elements] = self.program

    def _check_order(self, buffer: Buffer, elements: Array, lanes: Array, access: _Access) -> None:
        """Note an access; raise `WriteConflictError` if no barrier separates it from an access that it must follow.

        Each access shares out its lanes among the threads of a program in its own way. So two may touch one element.
        """
        for before in _BEHIND[access]:
            again = getattr(buffer, before)[elements] == self.phase
            if (access, before) == ("stored", "loaded"):
                again &= buffer.lane[elements] != lanes  # a lane that stores what it has loaded waits for it
            if again.any():
                element = elements[again][0]
                got = f"no barrier since program {self.program} has {before} it"
                raise WriteConflictError(f"element {element} of {buffer.name} is {access} in any order", got=got)
        getattr(buffer, access)[elements] = self.phase
        if access == "loaded":
            buffer.lane[elements] = lanes

    def _owner(self, buffer: Buffer, dtype: DType) -> Array:
        """The owner of each element of a buffer that programs write to as elements of `dtype`."""
        if buffer.owner is None:
            raise WriteConflictError(f"a program writes to {buffer.name}, which is no result")
        if dtype.itemsize != buffer.data.dtype.itemsize:
            width = f"{buffer.data.dtype.itemsize} bytes"
            raise WriteConflictError(f"elements of {buffer.name} are accessed in parts", expected=width, got=str(dtype))
        return buffer.owner


def _lanes(values: Array, active: Array | None) -> Array:
    """The values of the active lanes, as a vector."""
    return values.reshape(-1) if active is None else values[active]


def _numbers(pointers: Array, active: Array | None) -> Array:
    """The numbers of the active lanes."""
    return np.arange(pointers.size) if active is None else np.flatnonzero(active)
