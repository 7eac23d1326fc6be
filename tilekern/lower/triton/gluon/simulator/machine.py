"""A thread block or a cluster of thread blocks: roles run in turns, while copies and products proceed on their own.

Each role is a thread of Python, of which one runs at a time. It hands over at every barrier and at every asynchronous
operation; a seed decides who goes on: a role, a copy, or a product. So a seed stands for one of the possible orders.

Whatever the order, *clocks* tell what must happen before what (Lamport's relation, by vector clocks, as in Flanagan and
Freund 2009, "FastTrack"). A role counts its steps. It hands its clock to the barriers that it arrives at, and takes
over the clocks of barriers that it waits for. Each copy and product has a clock of its own, which begins with the clock
of the role that started it. Two accesses of one place, at least one a write, are a race if neither happens
before the other; also if they did not meet in this run.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tilekern.errors import InterpreterError

Clock = dict[int, int]


class FaultError(Exception):
    """A fault of the program.

    Attributes:
      error: the error to raise at the user's line.
      line: line of the text.
    """

    def __init__(self, error: InterpreterError, line: int) -> None:
        super().__init__(str(error))
        self.error, self.line = error, line


def _always() -> bool:
    return True


class _StopError(BaseException):
    """Ends the threads of a thread block that has a fault."""


@dataclass(eq=False)
class Event:
    """An asynchronous operation.

    Attributes:
      action: performs the operation.
      clock: the clock of all that happened before the operation, with the operation's own entry.
      queue: operations of one queue take place in order.
      line: line of the text that started it.
    """

    action: Callable[[], None]
    clock: Clock
    queue: object
    line: int
    done: bool = False


@dataclass(eq=False)
class Role:
    """A role: one thread.

    Attributes:
      number: place in clocks.
      name: for messages.
      clock: the clock of all that happened before its next step.
      ready: tells if the role may go on.
      waits_for: the operations or the barrier that it waits for, in words.
      line: line of the text that it has come to.
      part: number of its thread block in the cluster.
      products, stores: operations that it started and has not waited for.
    """

    number: int
    name: str
    clock: Clock = field(default_factory=dict[int, int])
    ready: Callable[[], bool] = field(default_factory=lambda: _always)
    waits_for: str = ""
    line: int = 0
    part: int = 0
    products: list[Event] = field(default_factory=list[Event])
    stores: list[Event] = field(default_factory=list[Event])
    finished: bool = False
    wake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Machine:
    """One thread block, or one cluster of thread blocks.

    Args:
      block: its number; blocks: of how many.
      seed: decides the order.
      file: file name of the text.
      parts: thread blocks of a cluster.
    """

    def __init__(self, block: int, blocks: int, seed: int, file: str, parts: int = 1) -> None:
        self.block, self.blocks, self.parts = block, blocks, parts
        self._random, self._file = random.Random(seed), file
        self._roles: list[Role] = []
        self._events: list[Event] = []
        self._by_thread: dict[int, Role] = {}
        self._back = threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._stopping = False
        self._count = 0
        self._main = self._new_role("the entry function")

    # --- roles ---

    @property
    def role(self) -> Role:
        """The role that runs."""
        return self._by_thread.get(threading.get_ident(), self._main)

    def _new_role(self, name: str, part: int = 0) -> Role:
        self._count += 1
        return Role(self._count, name, {self._count: 1}, part=part)

    def is_main(self) -> bool:
        """True while the entry function runs, outside of all roles."""
        return self.role is self._main

    def slice_of(self, dim: int | None, shape: Sequence[int], part: int) -> tuple[slice, ...]:
        """The elements of a tile that one thread block has, if they divide it along `dim`; all if `dim` is None."""
        slices = [slice(None)] * len(shape)
        if dim is not None:
            size = shape[dim] // self.parts
            slices[dim] = slice(part * size, (part + 1) * size)
        return tuple(slices)

    def line(self) -> int:
        """The line of the text that runs."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    def fail(self, summary: str, line: int = 0, expected: str = "", got: str = "") -> NoReturn:
        """Report a fault of the program."""
        raise FaultError(InterpreterError(summary, expected=expected, got=got), line or self.line())

    def run_roles(self, functions: list[tuple[str, Callable[[], None]]]) -> None:
        """Run functions as roles of each thread block, side by side, until all have ended."""
        for part in range(self.parts):
            for name, function in functions:
                role = self._new_role(f"{name} of block {part}" if self.parts > 1 else name, part)
                role.clock.update(self._main.clock)
                self._roles.append(role)
                threading.Thread(target=self._run, args=(role, function), daemon=True).start()
        try:
            while self._step():
                pass
        finally:
            self._stopping = True
            for role in self._roles:
                if not role.finished:
                    role.wake.release()
                    self._back.acquire()
        if self._fault is not None:
            raise self._fault

    def _run(self, role: Role, function: Callable[[], None]) -> None:
        self._by_thread[threading.get_ident()] = role
        role.wake.acquire()
        try:
            if not self._stopping:
                function()
                self._check_end(role)
        except _StopError:
            pass
        except BaseException as error:  # the thread that started the roles raises it
            self._fault = error
        role.finished = True
        self._back.release()

    def _check_end(self, role: Role) -> None:
        if role.stores:
            self.fail(
                "a role ends while shared memory is read for its stores", role.stores[0].line, "tma.store_wait(0)"
            )
        if role.products:
            self.fail("a role ends before a product that it started", role.products[0].line, "warpgroup_mma_wait(0)")

    def _step(self) -> bool:
        """True if a ready role, or an operation, went on; False if none can, or after a fault.

        The choice is random. Roles that wait for one another are a fault. `run_roles` raises the fault.
        """
        roles = [role for role in self._roles if not role.finished and role.ready()]
        queues = dict.fromkeys(event.queue for event in self._events)
        events = [next(e for e in self._events if e.queue is queue) for queue in queues]
        choices: list[Role | Event] = [*roles, *events]
        if self._fault is not None or not choices:
            if self._fault is None and not all(role.finished for role in self._roles):
                self._fault = self._deadlock()
            return False
        chosen = self._random.choice(choices)
        if isinstance(chosen, Event):
            self.finish(chosen)
        else:
            chosen.wake.release()
            self._back.acquire()
        return True

    def _deadlock(self) -> FaultError:
        stuck = [role for role in self._roles if not role.finished]
        places = "; ".join(f"{role.name} waits in line {role.line} for {role.waits_for}" for role in stuck)
        error = InterpreterError("the program does not end: its roles wait for one another", got=places)
        return FaultError(error, stuck[0].line)

    def pause(self, ready: Callable[[], bool] = _always, waits_for: str = "") -> None:
        """Hand over to other roles; go on when `ready`."""
        role = self.role
        if role is self._main:
            return
        role.ready, role.waits_for, role.line = ready, waits_for, self.line()
        self._back.release()
        role.wake.acquire()
        if self._stopping:
            raise _StopError
        role.clock[role.number] += 1

    # --- asynchronous operations ---

    def start(self, action: Callable[[Clock], None], queue: object) -> Event:
        """Start an operation, which takes place any time later."""
        self._count += 1
        clock = {**self.role.clock, self._count: 1}
        event = Event(lambda: action(clock), clock, queue, self.line())
        self._events.append(event)
        return event

    def finish(self, event: Event) -> None:
        """Let an operation take place."""
        self._events.remove(event)
        try:
            event.action()
        except FaultError as fault:
            fault.line = event.line
            self._fault = self._fault or fault
        event.done = True

    def join(self, events: list[Event], waits_for: str) -> None:
        """Wait for operations of the role that runs."""
        self.pause(lambda: all(event.done for event in events), waits_for)
        for event in events:
            merge(self.role.clock, event.clock)


class Barrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when all have arrived, and all bytes that were announced.

    Args:
      machine: its thread block.
      name: for messages.
      is_common: True for a barrier of a whole cluster, in its first thread block: all blocks arrive there, and the
        first alone waits.
    """

    def __init__(self, machine: Machine, name: str, is_common: bool = False) -> None:
        self._machine, self._name, self._is_common = machine, name, is_common
        self._count = self._missing = self._bytes = self.phases = 0
        self._clock: Clock = {}
        self._ended: Clock = {}

    def init(self, count: int) -> None:
        """Set the number of arrivals of a phase."""
        if self._count:
            self._machine.fail(f"the barrier {self._name} is initialised twice")
        self._count = self._missing = count * (self._machine.parts if self._is_common else 1)

    def arrive(self, count: int) -> None:
        """Arrive, with all that the role has done."""
        if not self._count:
            self._machine.fail(f"the barrier {self._name} is not initialised")
        if count > self._missing:
            self._machine.fail(f"more arrivals at the barrier {self._name} than a phase has", got=f"{count} more")
        merge(self._clock, self._machine.role.clock)
        self._missing -= count
        self._end_phase()
        self._machine.pause()

    def expect(self, nbytes: int) -> None:
        """Announce bytes, and arrive."""
        assert not self._is_common
        self._bytes += nbytes
        self.arrive(1)

    def bring(self, nbytes: int, clock: Clock, foreign: bool = False) -> None:
        """Bytes of a copy have come; bytes of another thread block may come before they are announced here."""
        if nbytes > self._bytes and not foreign:
            self._machine.fail(f"more bytes come at the barrier {self._name} than were announced", got=f"{nbytes}")
        merge(self._clock, clock)
        self._bytes -= nbytes
        self._end_phase()

    def wait(self, parity: int) -> None:
        """Wait until the phase of that parity has ended."""
        if self._is_common and self._machine.role.part:
            return
        if parity not in (0, 1):
            self._machine.fail(f"a wait for a phase of {self._name} that does not exist", got=f"parity {parity}")
        self._machine.pause(lambda: self.phases % 2 != parity, f"phase {parity} of {self._name}")
        merge(self._machine.role.clock, self._ended)

    def check_end(self) -> None:
        """Nothing may be under way when the program ends."""
        if self._bytes:
            self._machine.fail(f"{self._bytes} bytes never come at the barrier {self._name}")

    def _end_phase(self) -> None:
        if self._missing == self._bytes == 0:
            self.phases += 1
            self._missing = self._count
            self._ended = dict(self._clock)


def merge(clock: Clock, earlier: Clock) -> None:
    """Make `clock` come after `earlier`, too: take the greater of each entry."""
    for key, time in earlier.items():
        if clock.get(key, 0) < time:
            clock[key] = time
