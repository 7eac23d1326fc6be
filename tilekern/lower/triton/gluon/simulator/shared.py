"""Shared memory: rings of tiles, whose accesses are checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.gluon.simulator.machine import Barrier, Clock, Machine
from tilekern.lower.triton.gluon.simulator.tiles import Tile, integer


@dataclass(eq=False)
class Place:
    """One tile of a ring.

    Attributes:
      machine: the thread block.
      name: for messages.
      data: its elements; NaN until it is written.
      written: the clock of the last write, of a role or a copy; None before the first write.
      read: the clocks of all reads since.
      unfenced: the role that stored to it, and has no fence since: copies might not see its store.
    """

    machine: Machine
    name: str
    data: Array
    written: Clock | None = None
    read: list[Clock] = field(default_factory=list[Clock])
    unfenced: object = None

    def write(self, value: Array, clock: Clock, before: Clock) -> None:
        """Write the tile; `before` is the clock of all that happened before, and `clock` has the write itself, too."""
        self._order(before, "written", [*self.read, *([] if self.written is None else [self.written])])
        self.data[...] = value
        self.written, self.read = dict(clock), []

    def reads(self, clock: Clock, before: Clock) -> Array:
        """The elements of the tile, for a reader; clocks as in `write`."""
        if self.written is None:
            self.machine.fail(f"{self.name} is read before anything is written there")
        self._order(before, "read", [self.written])
        self.read.append(dict(clock))
        return self.data

    def _order(self, before: Clock, access: str, clocks: Sequence[Clock]) -> None:
        """All accesses with `clocks` must have happened before."""
        for clock in clocks:
            own = max(clock, key=lambda key: key)  # an access is the last entry that its clock got
            if before.get(own, 0) < clock[own]:
                self.machine.fail(
                    f"a race: {self.name} is {access} while another access may be under way",
                    expected="a barrier between both",
                    got=f"an access that is ordered with none of {len(clocks)} others",
                )


def stamped(machine: Machine) -> Clock:
    """The clock of an access that the running role makes at once: an entry of its own, which the role has after it."""
    event = machine.start(lambda _: None, object())
    machine.finish(event)
    machine.role.clock.update({max(event.clock): 1})
    return event.clock


class View:
    """A place in another shape, or with its dims in another order, or some of its rows.

    Attributes:
      twins: the same place in all thread blocks of a cluster.
    """

    def __init__(
        self,
        place: Place,
        shape: tuple[int, ...],
        order: tuple[int, ...] | None = None,
        rows: slice = slice(None),
        twins: Sequence[Place] = (),
    ) -> None:
        self.place, self.shape, self._order, self._rows = place, shape, order, rows
        self.twins = twins or [place]

    def reshape(self, shape: Sequence[int]) -> View:
        """The same place in another shape."""
        assert self._order is None
        return View(self.place, tuple(shape))

    def permute(self, order: Sequence[int]) -> View:
        """The same place with its dims in another order."""
        assert self._order is None
        return View(self.place, self.shape, tuple(order))

    def slice(self, start: int, length: int) -> View:
        """A View whose loads and stores take the rows `start` to `start + length`. Its `shape` counts all rows."""
        assert self._order is None
        return View(self.place, self.shape, rows=slice(start, start + length))

    def seen(self, data: Array) -> Array:
        """Elements of the place, in the view's shape and order."""
        values = data.reshape(self.shape)
        return values if self._order is None else values.transpose(self._order)

    def load(self, layout: Any) -> Tile:
        """A tile in registers."""
        del layout
        before = dict(self.place.machine.role.clock)
        data = self.seen(self.place.reads(stamped(self.place.machine), before))[self._rows]
        return Tile(data.copy())

    def store(self, value: Tile) -> None:
        """Store a tile from registers."""
        machine, place = self.place.machine, self.place
        whole = self.seen(place.data).copy()
        if value.data.shape != whole[self._rows].shape or value.data.dtype != place.data.dtype:
            machine.fail("a store of another type to shared memory", got=f"{value.data.dtype}{list(value.data.shape)}")
        before = dict(machine.role.clock)
        whole[self._rows] = value.data
        place.write(whole.reshape(place.data.shape), stamped(machine), before)
        place.unfenced = machine.role
        machine.pause()


class Ring:
    """A buffer in shared memory: tiles, or barriers. Each thread block of a cluster has one.

    Attributes:
      places: its tiles, thread block after thread block.
      barriers: its barriers, in the same order; a barrier of a whole cluster counts once.
    """

    def __init__(self, machine: Machine, name: str, dtype: Any, shape: Sequence[int]) -> None:
        self._machine, self._name, self._count = machine, name, shape[0]
        self.places: list[Place] = []
        self.barriers: list[Barrier] = []
        numbers = range(shape[0])
        if dtype == np.int64:
            parts = shape[1] if len(shape) > 1 else 1
            common = parts < machine.parts
            self.barriers = [Barrier(machine, f"{name} {n}", common) for _ in range(parts) for n in numbers]
            return
        with np.errstate(all="ignore"):
            data = [np.full(shape[1:], np.nan).astype(dtype) for _ in range(machine.parts * shape[0])]
        self.places = [Place(machine, f"place {n % shape[0]} of {name}", x) for n, x in enumerate(data)]

    def index(self, number: Any) -> Any:
        """A place of the thread block that asks."""
        which = integer(number)
        if not 0 <= which < self._count:
            self._machine.fail(
                f"there is no such place in {self._name}", expected=f"0 to {self._count - 1}", got=str(which)
            )
        part = self._machine.role.part
        if self.barriers:
            barriers = self.barriers[which :: self._count]
            return barriers[min(part, len(barriers) - 1)]
        twins = self.places[which :: self._count]
        return View(twins[part], twins[part].data.shape, twins=twins)

    def twins(self, barrier: Barrier) -> list[Barrier]:
        """The same barrier in all thread blocks of a cluster."""
        return self.barriers[self.barriers.index(barrier) % self._count :: self._count]
