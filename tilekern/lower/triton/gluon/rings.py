"""Rings of tiles in shared memory: the names of their places, and of the barriers at which roles meet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tilekern.ir.control import Fold
from tilekern.ir.memory import Load
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.source_text import Writer
from tilekern.lower.triton.gluon.channels import Channel, is_own
from tilekern.lower.triton.gluon.plan import Plan


class Buffers:
    """The names of the buffers and barriers in shared memory, which both roles get as arguments.

    Attributes:
      tiles: for each load, its ring of tiles.
      filled, freed: for each channel, its barriers.
      released: for each channel with tiles that all thread blocks of a cluster get by one copy, the barriers at which
        all their programs arrive that have read the tiles. Only the thread block that copies waits there.
      trimmed: for each channel with trimmed tiles that programs share, the barrier behind the trimming.
      widened: for each load of 8 bits whose cast tile has places of its own, the places.
      stored: for each store with a place of its own, the place.
      turn: barriers by which the programs of a group take turns to multiply; "" if they take none.
    """

    def __init__(self, plan: Plan, names: Names) -> None:
        self.tiles: dict[Load, str] = {}
        self.filled: dict[Channel, str] = {}
        self.freed: dict[Channel, str] = {}
        for channel in plan.unique:
            self.tiles.update((op, names.fresh(f"{op.ref.name}_tiles")) for op in channel.loads)
            self.filled[channel] = names.fresh(f"{channel.name}_filled")
            self.freed[channel] = names.fresh(f"{channel.name}_freed")
        self.released = {c: names.fresh(f"{c.name}_released") for c in plan.unique if plan.copies_to_all(c)}
        self.widened = {op: names.fresh(f"{op.ref.name}_wide") for op in plan.widened}
        self.trimmed = {c: names.fresh(f"{c.name}_trimmed") for c in plan.unique if plan.trims_together(c)}
        self.stored = {op: names.fresh(f"{op.ref.name}_tiles") for op, place in plan.staging.items() if place is None}
        self.turn = names.fresh("turns") if plan.takes_turns else ""

    @property
    def names(self) -> list[str]:
        """The names of all rings and barriers."""
        rings = self.tiles, self.widened, self.stored, self.filled, self.freed, self.released, self.trimmed
        ring_names = [name for names in rings for name in names.values()]
        return [*ring_names, self.turn] if self.turn else ring_names


class Rings:
    """The places of one role in the rings, as expressions of its program.

    A role counts its steps through the ring of each loop: step n is at place n % stages, and its barriers have the
    phase n // stages % 2.

    Attributes:
      steps: for each loop with rings, the variable that counts.

    Args:
      plan: the plan.
      buffers: the rings and barriers.
      names: names in use in the role.
      writer: the lines of the role.
    """

    def __init__(self, plan: Plan, buffers: Buffers, names: Names, writer: Writer) -> None:
        self._plan, self._buffers, self._names, self._writer = plan, buffers, names, writer
        self.steps: dict[Fold, str] = {}
        self._places: dict[Fold | None, tuple[str, str]] = {}

    def begin(self) -> None:
        """Assign 0 to the steps of all loops."""
        for fold in dict.fromkeys(channel.fold for channel in self._plan.unique):
            if fold is not None:
                self.steps[fold] = self._names.fresh("step")
                self._writer.line(f"{self.steps[fold]} = 0")

    def begin_round(self, number: str) -> None:
        """Set the phase of the rings outside of loops, in round `number` of the loop over groups."""
        self._places[None] = "0", f"{number} % 2"

    def enter_step(self, fold: Fold) -> None:
        """Assign the place in the rings of a loop, and the phase of their barriers."""
        step, stages = self.steps[fold], self._plan.stages
        names = self._places.get(fold) or (self._names.fresh("slot"), self._names.fresh("phase"))
        self._places[fold] = names
        self._writer.line(f"{names[0]} = {step} % {stages}")
        self._writer.line(f"{names[1]} = {step} // {stages} % 2")

    def leave_step(self, fold: Fold) -> None:
        """Count a step of a loop."""
        self._writer.line(f"{self.steps[fold]} += 1")

    @contextmanager
    def step_before(self, fold: Fold) -> Generator[None]:
        """A context in which the places of a loop are places of the step before."""
        places, step, stages = self._places[fold], self.steps[fold], self._plan.stages
        slot, phase = self._names.fresh("slot_before"), self._names.fresh("phase_before")
        self._writer.line(f"{slot} = ({step} - 1) % {stages}")
        self._writer.line(f"{phase} = ({step} - 1) // {stages} % 2")
        self._places[fold] = slot, phase
        yield
        self._places[fold] = places

    def phase(self, channel: Channel) -> str:
        """The phase of a channel's barriers."""
        return self._places[channel.fold][1]

    def at(self, channel: Channel, which: str = "number") -> str:
        """The place of a channel's barriers: each program has its own if it shares no tile.

        `which` is the number of the program in its group.
        """
        return self._places[channel.fold][0] if channel.shared else self._own_place(channel, which)

    def tile(self, load: Load, which: str = "number") -> str:
        """The place of a load's tile."""
        channel = self._plan.channels[load]
        own = is_own(load, self._plan.group.varying)
        at = self._own_place(channel, which) if own else self._places[channel.fold][0]
        return f"{self._buffers.tiles[load]}.index({at})"

    def _own_place(self, channel: Channel, which: str) -> str:
        place, _ = self._places[channel.fold]
        if self._plan.group.count == 1:
            return place
        return which if channel.stages == 1 else f"{which} * {channel.stages} + {place}"

    def freed(self, channel: Channel) -> list[str]:
        """The barriers at which a program arrives that has read a channel's tiles."""
        barriers = self._buffers.freed[channel], self._buffers.released.get(channel)
        return [f"{name}.index({self.at(channel)})" for name in barriers if name]

    def freed_before(self, fold: Fold) -> list[str]:
        """The barriers at which programs arrive that have read the tiles of the step before."""
        places = self._places[fold]
        step = f"({self.steps[fold]} + {self._plan.stages - 1})"
        self._places[fold] = f"{step} % {self._plan.stages}", ""
        barriers = [barrier for c in self._plan.unique if c.fold is fold for barrier in self.freed(c)]
        self._places[fold] = places
        return barriers

    def arrive(self, barriers: Sequence[str], only_if: str = "") -> None:
        """Arrive at barriers, once at each."""
        pred = f", pred={only_if}" if only_if else ""
        for barrier in dict.fromkeys(barriers):
            self._writer.line(f"mbarrier.arrive({barrier}, count=1{pred})")


def own_box(text: str, block: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """A place in shared memory, in the shape of the tile."""
    return text if block == shape else f"{text}.reshape({list(shape)})"
