"""The way of a warp through the code: its branches are decided by evaluating the instructions that they depend on."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilekern.estimate.gpu.effects import EFFECTS, address_of
from tilekern.estimate.gpu.lanes import exchanged, is_exchange, origins, reads_of
from tilekern.estimate.gpu.passages import Layer, Passages
from tilekern.estimate.gpu.rules import evaluate
from tilekern.estimate.gpu.sass import INDEXED, Instruction, Listing
from tilekern.estimate.gpu.scalar import Registers, Thread, Value

MAX_STEPS = 2_000_000

Effect = tuple[int, str, "int | str | None", int | None]
"""Number of an instruction, the kind of its effect on other warps, its barrier, and a number: see `effects`."""

Shared = Mapping[int, Sequence[int | None]]
"""Bytes that a warp stored to shared memory, by address, in its order; None for a byte that is not known."""

_BRANCHES = frozenset(("BRA", "JMP", "EXIT", "CALL", "RET", *INDEXED))
_TASKS = frozenset(("LDS", "STS"))
_WORK = frozenset(
    """MUFU LDG STG LD ST LDS STS LDSM STSM LDGSTS ATOM ATOMG ATOMS RED REDG LDL STL UTMASTG HGMMA QGMMA IGMMA BGMMA
    HMMA IMMA QMMA""".split()  # noqa: SIM905 -- a list would take a line for each
)
"""Operations whose work does not count where their guard is false."""


@dataclass(frozen=True)
class Segment:
    """Instructions that run one after the other.

    Attributes:
      start: number of the first instruction.
      stop: number of the last instruction, plus 1.
      effects: the effects on other warps.
      off: numbers of the instructions whose guard is false.
      again: True if a jump back leads here: another iteration of the loop that starts here.
    """

    start: int
    stop: int
    effects: tuple[Effect, ...] = ()
    off: tuple[int, ...] = ()
    again: bool = False


@dataclass
class Walk:
    """The way of one warp.

    Attributes:
      segments: the segments that it runs, in order.
      assumed: for each branch that depends on unknown values, the assumption, "not taken", say.
      undecided: labels of loops whose end depends on unknown values.
      stored: bytes that it stored to shared memory; only of programs whose warps get their tasks there.
    """

    segments: list[Segment] = field(default_factory=list[Segment])
    assumed: dict[str, str] = field(default_factory=dict[str, str])
    undecided: set[str] = field(default_factory=set[str])
    stored: defaultdict[int, list[Value]] = field(default_factory=lambda: defaultdict[int, list[Value]](list))

    @property
    def visits(self) -> Counter[int]:
        """Counts of visits to each place, by the number of its first instruction; loops start at such places."""
        return Counter(segment.start for segment in self.segments)

    def add(self, passage: Walk) -> None:
        """Add the walk through a loop, from its entry until it is left."""
        self.segments += passage.segments
        self.assumed |= passage.assumed
        self.undecided |= passage.undecided


@dataclass
class _Place:
    """The place that a warp has come to, and the segment that it is in.

    Attributes:
      position: number of the next instruction.
      start: number of the segment's first instruction.
      effects, off, again: see `Segment`.
      enters: True if a loop starts at the position, and is entered.
    """

    position: int = 0
    start: int = 0
    effects: list[Effect] = field(default_factory=list[Effect])
    off: list[int] = field(default_factory=list[int])
    again: bool = False
    enters: bool = False

    def copy(self) -> _Place:
        return replace(self, effects=[*self.effects], off=[*self.off])


@dataclass(frozen=True)
class _Passage:
    """The way through a loop: the registers that it writes, its segments, steps, and the place where it ends."""

    writes: Registers
    walk: Walk
    steps: int
    end: _Place


@dataclass(frozen=True)
class _Inside:
    """A loop that a warp is in: its instructions, the walk before its entry, and the steps until then."""

    loop: range
    walk: Walk
    steps: int


def _rounds(header: int) -> str:
    """A register of ours: how often the warp has jumped back to a loop's header since it entered the loop."""
    return f"rounds of {header}"


def _rounds_of(thread: Thread, header: int) -> int:
    rounds = thread.registers.get(_rounds(header), 0)
    assert isinstance(rounds, int)
    return rounds


class Walker:
    """Walks warps through one function.

    Args:
      listing: the function.
      trips: iterations of a loop whose end depends on unknown values, by its label, with "" for all others.
      effects: False if only the way counts; this is faster.
      taken: branches ahead, as `Walk.assumed` names them, that are taken where they depend on unknown values.
    """

    def __init__(
        self, listing: Listing, trips: Mapping[str, int], effects: bool = True, taken: Collection[str] = ()
    ) -> None:
        self.listing, self.trips, self.taken = listing, trips, taken
        self._effects = EFFECTS if effects else {}
        specialised = any(i.name in (*INDEXED, "USETMAXREG") for i in listing.code)
        self._tasks = _TASKS if specialised else frozenset[str]()
        self._works = _WORK if effects else frozenset[str]()
        code = listing.code
        self._targets = {n: listing.destination(i) for n, i in enumerate(code) if i.target and i.name != "BSSY"}
        self.headers = frozenset(to for n, to in self._targets.items() if code[n].name in ("BRA", "JMP") and to < n)
        """Numbers of the instructions at which loops start."""
        self._labels = {n: label for label, n in reversed(listing.labels.items()) if n in self.headers}
        self._needed = self._evaluated()
        self._next = self._following()
        self._loops = self._remembered()
        self._segments: dict[tuple[object, ...], Segment] = {}  # equal segments are one object
        self._passages, self._context = Passages[_Passage](), ({}, {})
        branches = (n for n, i in enumerate(code) if i.name in _BRANCHES or n in self.headers)
        straight = range(0 if specialised else next(branches, len(code)))
        deciding = [n for n in straight if is_exchange(code[n]) and self._next[n] == n]
        self._shared = [code[n] for n in origins(code[: max(deciding, default=-1) + 1], deciding)]

    @property
    def depends_on_program(self) -> bool:
        """True if the way may depend on the number of the program."""
        evaluated = [i for e, i in zip(self._needed, self.listing.code, strict=True) if e]
        return any("SR_CTAID" in "".join(i.inputs) for i in (*evaluated, *self._shared))

    def start(self, threads: Callable[[int, int], Thread], warps: int) -> list[Thread]:
        """The first thread of each warp, which knows what other threads tell it before the first branch.

        Args:
          threads: the state of a thread at its start, by the numbers of the warp and of the lane.
          warps: warps of the program.
        """
        firsts = [threads(warp, 0) for warp in range(warps)]
        if self._shared:
            for first, values in zip(firsts, exchanged(self._shared, threads, warps), strict=True):
                first.exchanged = values
        return firsts

    def walk(self, thread: Thread, stop: tuple[int, int] | None = None, tasks: Shared | None = None) -> Walk:
        """Run the first thread of a warp to its end. The loop is long because all of its state changes together.

        Args:
          thread: the state of the thread.
          stop: the number of a loop's first instruction, and a count: the walk ends at the visit after so many.
          tasks: bytes that the first warp stored; each time that another warp loads a byte, it gets the next byte.

        Raises:
          ValueError: an indexed branch whose index is not known, a return without a call, or no end after millions of
            steps.
        """
        self._check_passages(thread)
        walk, calls, inside = Walk(), list[int](), list[_Inside]()
        loads = {address: iter(values) for address, values in (tasks or {}).items()}
        code, last = self.listing.code, len(self.listing.code)
        here, steps = _Place(), 0
        place, left = stop or (-1, 0)
        while steps < MAX_STEPS:
            steps += 1
            n = self._next[here.position]
            while inside and n not in inside[-1].loop:
                here.position = n
                walk = self._leave(inside.pop(), thread, walk, here, steps)
            if n == place and n in self.headers and (n != here.start or here.position == here.start):
                left -= 1
                if left < 0:
                    return self._ended(walk, here, n, thread, inside)
            if n >= last:
                return self._ended(walk, here, last, thread, inside)
            instruction = code[n]
            if n in self.headers and n != here.start:  # falls into a loop
                self._close(walk, here, n)
                here.start, here.enters, thread.registers[_rounds(n)] = n, True, 0
            if here.enters and n in self._loops and place not in self._loops[n]:
                here.enters = False
                if passage := self._passages.get(n, thread.registers):
                    thread.registers.update(passage.writes)
                    walk.add(passage.walk)
                    here, steps = passage.end.copy(), steps + passage.steps - 1
                    continue
                inside.append(_Inside(self._loops[n], walk, steps))
                walk, thread.registers = Walk(), Layer(thread.registers)
            if instruction.name in self._tasks:
                _pass_task(thread, instruction, walk, loads)
                here.position = n + 1
                continue
            if instruction.name not in _BRANCHES:
                self._step(thread, n, instruction, here.effects, here.off)
                here.position = n + 1
                continue
            to = self._branch(thread, n, instruction, calls, walk)
            if to is None:
                here.position = n + 1
                continue
            self._close(walk, here, n + 1, jumps_back=to in self.headers and to <= n)
            if to >= last:
                return self._ended(walk, here, here.start, thread, inside)
            if to in self.headers:
                thread.registers[_rounds(to)] = _rounds_of(thread, to) + 1 if to <= n else 0
            here.position, here.start, here.enters = to, to, to > n
        raise ValueError(f"{self.listing.name}: no end after {MAX_STEPS} steps; expected loops that end, or `trips`")

    def _check_passages(self, thread: Thread) -> None:
        """Forget the passages of threads that have other constants, or another memory."""
        context = thread.constants, thread.memory
        if context != self._context:
            self._context, self._passages = context, Passages[_Passage]()

    def _close(self, walk: Walk, here: _Place, stop: int, jumps_back: bool = False) -> None:
        """End the segment before an instruction."""
        if stop > here.start:
            parts = here.start, stop, tuple(here.effects), tuple(here.off), here.again
            walk.segments.append(self._segments.setdefault(parts, Segment(*parts)))
        here.effects, here.off, here.again = [], [], jumps_back

    def _leave(self, inside: _Inside, thread: Thread, walk: Walk, here: _Place, steps: int) -> Walk:
        """Remember how a loop was passed; the walk from the loop's entry becomes a part of the walk around it."""
        layer = thread.registers
        assert isinstance(layer, Layer)
        passage = _Passage(dict(layer), walk, steps - inside.steps, here.copy())
        self._passages.add(inside.loop.start, layer, passage, len(walk.segments))
        thread.registers = layer.merge()
        inside.walk.add(walk)
        return inside.walk

    def _ended(self, walk: Walk, here: _Place, stop: int, thread: Thread, inside: list[_Inside]) -> Walk:
        """The whole walk, which ends before an instruction, within some loops."""
        self._close(walk, here, stop)
        for outer in reversed(inside):
            assert isinstance(thread.registers, Layer)
            thread.registers = thread.registers.merge()
            outer.walk.add(walk)
            walk = outer.walk
        return walk

    def _step(self, thread: Thread, n: int, instruction: Instruction, effects: list[Effect], off: list[int]) -> None:
        runs = thread.holds(instruction.guard, instruction.negated)
        if effect := self._effects.get(instruction.name):
            outcome = effect(thread, instruction, runs is not False)
            if outcome is not None:
                effects.append((n, *outcome))
        if runs is False:
            off.append(n)
        evaluate(instruction, thread)

    def _branch(self, thread: Thread, n: int, instruction: Instruction, calls: list[int], walk: Walk) -> int | None:
        """The number of the instruction that a branch leads to; None if it is not taken."""
        taken = thread.holds(instruction.guard, instruction.negated)
        if "DIV" in instruction.suffixes or "CONV" in instruction.suffixes:
            return None  # threads of a warp stay together
        for operand in instruction.operands[:-1]:
            if re.match(r"!?U?P", operand):
                value = thread.read(operand)
                taken = None if value is None or taken is None else taken and bool(value)
        if instruction.name == "EXIT":
            if taken is None:
                walk.assumed[f"EXIT at {instruction.address:#x}"] = "not taken"
            return len(self.listing.code) if taken else None
        if instruction.name in INDEXED:
            return self._indexed(thread, n, instruction)
        if instruction.name == "RET":
            if not calls:
                raise ValueError(f"RET at {instruction.address:#x} without a call")
            return calls.pop() if taken else None
        to = self._targets[n]
        if taken is None:
            taken = self._assumed(thread, n, to, instruction, walk)
        if taken and instruction.name == "CALL":
            calls.append(n + 1)
        return to if taken else None

    def _indexed(self, thread: Thread, n: int, instruction: Instruction) -> int:
        """The number of the instruction that an indexed branch leads to.

        The listing names each target once, in the order of the table. Triton's table has a target for each task, then
        several times the target for warps without a task. Its last entry is the exit, for the largest index that a
        comparison before the branch lets pass.
        """
        index, table = thread.read(instruction.operands[0].split()[0]), instruction.table
        if index is None or not table:
            raise ValueError(
                f"{instruction.name} at {instruction.address:#x}: branches to unknown addresses cannot be followed"
            )
        before = (
            i for i in self.listing.code[max(0, n - 12) : n] if i.name in ("ISETP", "UISETP") and "GT" in i.suffixes
        )
        last = next((thread.read(i.inputs[1]) for i in before), None)
        label = table[-1] if index == last else table[min(index, max(0, len(table) - 2))]
        return self.listing.labels[label]

    def _assumed(self, thread: Thread, n: int, to: int, instruction: Instruction, walk: Walk) -> bool:
        """True if a branch by unknown values is taken: back, until `trips` iterations; ahead, if it is in `taken`."""
        where = f"{instruction.opcode} at {instruction.address:#x}"
        if to > n:
            walk.assumed[where] = "taken" if where in self.taken else "not taken"
            return where in self.taken
        label = self._labels[to]
        trips = self.trips.get(label, self.trips.get("", 1))
        walk.assumed[where] = f"loop {label} runs {trips} times"
        walk.undecided.add(label)
        return _rounds_of(thread, to) + 1 < trips

    def _remembered(self) -> dict[int, range]:
        """By header the instructions of each loop whose passages follow from registers, constants and memory alone."""
        ends = {to: n + 1 for n, to in sorted(self._targets.items()) if to in self.headers and to <= n}
        excluded = {"CALL", "RET"} | self._tasks
        apart = [
            i.name in excluded or (needed and "SR_" in "".join(i.inputs))
            for i, needed in zip(self.listing.code, self._needed, strict=True)
        ]
        return {start: range(start, stop) for start, stop in ends.items() if not any(apart[start:stop])}

    def _following(self) -> list[int]:
        """For each position the number of the next instruction, from there on, that has to be evaluated."""
        code, evaluated = self.listing.code, self._needed
        following, upcoming = [len(code)] * (len(code) + 1), len(code)
        for n in reversed(range(len(code))):
            upcoming = n if evaluated[n] or n in self.headers else upcoming
            following[n] = upcoming
        return following

    def _evaluated(self) -> list[bool]:
        """One flag for each instruction: True if it has to be evaluated.

        Branches, effects and guarded work have to be, and all instructions that their operands depend on: liveness,
        backwards. Sets of registers are bits of integers.
        """
        code = self.listing.code
        number: dict[str, int] = defaultdict(lambda: len(number))

        def bits(registers: Iterable[str]) -> int:
            return sum({1 << number[r] for r in registers})

        reads, writes = [bits(reads_of(i)) for i in code], [bits(i.writes) for i in code]
        guards = [bits([i.guard]) if i.guard else 0 for i in code]
        # A wait always succeeds: its result needs no address.
        reads = [0 if i.name == "SYNCS" and not self._effects else r for r, i in zip(reads, code, strict=True)]
        roots = [i.name in _BRANCHES or i.name in self._effects or i.name in self._tasks for i in code]
        works = [bool(i.guard) and i.name in self._works for i in code]
        follow = [self._successors(n) for n in range(len(code))]
        live, needed, changed = [0] * (len(code) + 1), list(roots), True
        while changed:
            changed = False
            for n in reversed(range(len(code))):
                after = 0
                for m in follow[n]:
                    after |= live[m]
                needed[n] = needed[n] or bool(writes[n] & after)
                before = after if guards[n] else after & ~writes[n]
                before |= (reads[n] if needed[n] else 0) | (guards[n] if works[n] else 0)
                changed = changed or before != live[n]
                live[n] = before
        return [a or b for a, b in zip(needed, works, strict=True)]

    def _successors(self, n: int) -> list[int]:
        code = self.listing.code
        instruction = code[n]
        following = [self._targets[n]] if n in self._targets else [self.listing.labels[t] for t in instruction.table]
        if instruction.name == "RET":
            following += [m + 1 for m, i in enumerate(code) if i.name == "CALL"]
        sure = not instruction.guard and len(instruction.operands) < 2
        if not (instruction.name in ("BRA", "JMP", "EXIT", "RET", *INDEXED) and sure):
            following.append(n + 1)
        return [m for m in following if m <= len(code)]


def _pass_task(thread: Thread, instruction: Instruction, walk: Walk, loads: dict[int, Iterator[Value]]) -> None:
    """Run a store of bytes that other warps load, or a load of such bytes."""
    if thread.holds(instruction.guard, instruction.negated) is False:
        return
    operand = next(o for o in instruction.operands if o.startswith("["))
    address = address_of(thread, operand)
    if instruction.name == "LDS":
        byte_of_task = next(loads[address], None) if isinstance(address, int) and address in loads else None
        thread.registers.update(dict.fromkeys(instruction.writes))
        thread.write(instruction.operands[0], byte_of_task)
        return
    source = instruction.inputs[-1]
    words = thread.pair(source) if "64" in instruction.suffixes else (thread.read(source),)
    if isinstance(address, int):
        for n, word in enumerate(words):
            for byte in range(4):
                walk.stored[address + 4 * n + byte].append(None if word is None else word >> 8 * byte & 255)
