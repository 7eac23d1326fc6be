"""A multiprocessor that runs warps: when each instruction is issued, and when units are busy.

Four quarters issue one instruction a cycle each, of the warp that issued last if it can go on. A warp issues in order:
an instruction waits for the registers that it reads and for its unit. Products of warpgroups start when all four warps
have issued them, and run in that order, beside everything else. Copies come from a memory that serves them in order.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tilekern.estimate.gpu import rates
from tilekern.estimate.gpu.rates import Gpu
from tilekern.estimate.gpu.sass import ASYNCHRONOUS, Instruction
from tilekern.estimate.gpu.walk import Effect, Segment
from tilekern.estimate.gpu.work import Work

_STALLS = {"MEMBAR": rates.FENCE_LATENCY, "FENCE": rates.FENCE_LATENCY}
_LOADS = frozenset(("LDG", "LD", "ATOM", "ATOMG"))


class Deadlock(Exception):
    """No warp can go on: the walks of its program do not fit together."""


@dataclass
class Run:
    """A simulated run.

    Attributes:
      cycles: cycles until the last warp ended.
      tensor: cycles in which the tensor cores computed.
      visits: for each warp, the times at which its segments began.
    """

    cycles: float
    tensor: float
    visits: list[list[float]]


@dataclass
class _Phases:
    """A barrier in shared memory: arrivals and bytes until now, and the number of complete phases."""

    arrivals_per_phase: int = 1
    phases: Sequence[int] = ()  # bytes of each phase
    copies: Mapping[int, int] = field(default_factory=dict[int, int])  # by warp, in all phases
    issued_copies: Counter[int] = field(default_factory=Counter[int])  # by warp, until now
    arrivals: int = 0
    expected: float = 0.0
    landed: float = 0.0
    complete: int = 0
    waiting: list[tuple[int, _Warp]] = field(default_factory=list[tuple[int, "_Warp"]])

    def next_copy(self, warp: int) -> float:
        """Bytes of the next copy of a warp: a part of its phase, to which all warps contribute alike."""
        phase = self.issued_copies[warp] * len(self.phases) // self.copies[warp]
        self.issued_copies[warp] += 1
        return self.phases[phase] * len(self.phases) / sum(self.copies.values()) if self.phases else 0.0

    def advance(self) -> bool:
        """Complete the phase if all warps arrived and all bytes landed; True if so."""
        if (
            self.arrivals >= (self.complete + 1) * max(1, self.arrivals_per_phase)
            and self.landed >= self.expected - 0.5
        ):
            self.complete += 1
            return True
        return False


class _Group:
    """A warpgroup: its products in order, and the cycles at which begun products end."""

    def __init__(self) -> None:
        self.issued: defaultdict[int, int] = defaultdict(int)
        self.ends: list[float] = []
        self.waiting: list[_Warp] = []


class _Warp:
    def __init__(self, program: int, number: int, segments: Sequence[Segment], group: _Group) -> None:
        self.program, self.number, self.segments, self.group = program, number, segments, group
        self.quarter = number % rates.SUBPARTITIONS
        self.time, self.segment = 0.0, 0
        self.position, self.stop = (segments[0].start, segments[0].stop) if segments else (0, 0)
        self.effects, self.off = _of(segments[0]) if segments else ({}, frozenset[int]())
        self.ready: dict[str, float] = {}
        self.products = 0
        self.groups: list[int] = []  # for each committed group, the number of products until its end
        self.copies: list[float] = []
        self.pending_copies = 0.0
        self.phases: dict[int | str, list[int]] = {}  # for each barrier, phases before its last init, and since
        self.visits = [0.0]


def _waits_or_counts(instruction: Instruction) -> bool:
    """True if an instruction multiplies beside the others, or if it waits for such products or for copies."""
    return instruction.name in (*ASYNCHRONOUS, "WARPGROUP", "LDGDEPBAR", "UTMACMDFLUSH", "DEPBAR")


def _of(segment: Segment) -> tuple[dict[int, Effect], frozenset[int]]:
    return {effect[0]: effect for effect in segment.effects}, frozenset(segment.off)


class Machine:
    """One multiprocessor.

    Args:
      gpu: the GPU.
      code: instructions of the function.
      works: their work on the GPU.
      bandwidth: bytes of memory traffic a cycle.
      latency: cycles of a load.
    """

    def __init__(
        self, gpu: Gpu, code: Sequence[Instruction], works: Sequence[Work], bandwidth: float, latency: float
    ) -> None:
        self._gpu, self._code, self._works, self._bandwidth, self._latency = gpu, code, works, bandwidth, latency
        self._reads, self._writes = [i.reads for i in code], [i.writes for i in code]
        self._units_of = [work.unit if work.unit != "issue" else "" for work in works]
        self._waits_or_counts = [_waits_or_counts(i) for i in code]

    def run(self, programs: Sequence[Sequence[Sequence[Segment]]], *, cut: bool = False) -> Run:
        """Run resident programs, each of which has the segments of its warps.

        Args:
          programs: for each program, for each of its warps, the segments.
          cut: walks end in the middle, where warps without work may stand at a barrier of threads that other warps
            would come to later.

        Raises:
          Deadlock: warps wait for an arrival that never comes.
        """
        self._queue: list[tuple[float, int, _Warp | Callable[[float], None]]] = []
        self._order = 0
        self._issue = [0.0] * rates.SUBPARTITIONS
        self._units: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(rates.SUBPARTITIONS)]
        self._port = self._memory = self._tensor = self._tensor_busy = 0.0
        self._phases: dict[tuple[int, int | str], _Phases] = {}
        self._joins: defaultdict[tuple[int, int | str | None], list[_Warp | None]] = defaultdict(list)
        warps: list[_Warp] = []
        for number, program in enumerate(programs):
            groups: defaultdict[int, _Group] = defaultdict(_Group)
            of_program = [_Warp(number, n, segments, groups[n // 4]) for n, segments in enumerate(program)]
            self._prepare(number, of_program)
            warps += of_program
        self._alive = {p: sum(w.program == p for w in warps) for p in range(len(programs))}
        for warp in warps:
            self._push(0.0, warp)
        running, end = len(warps), 0.0
        self._ended = 0
        while self._queue:
            time, _, event = heapq.heappop(self._queue)
            if isinstance(event, _Warp):
                self._go(event, time)
            else:
                event(time)
            end = max(end, time)
        idle = sum(warp is not None for waiting in self._joins.values() for warp in waiting) if cut else 0
        if self._ended + idle < running:
            raise Deadlock
        visits = [w.visits + [w.time] * (len(w.segments) - len(w.visits)) for w in warps]
        return Run(max([end, *(w.time for w in warps)]), self._tensor_busy, visits)

    def _prepare(self, program: int, warps: Sequence[_Warp]) -> None:
        """Count arrivals, bytes and copies of each barrier."""
        arrive: defaultdict[int | str, set[int]] = defaultdict(set)
        nbytes: defaultdict[int | str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        copies: defaultdict[int | str, Counter[int]] = defaultdict(Counter)
        for warp in warps:
            for _, kind, barrier, amount in (effect for segment in warp.segments for effect in segment.effects):
                if barrier is None:
                    continue
                if kind in ("arrive", "commit"):
                    arrive[barrier].add(warp.number)
                if kind in ("arrive", "expect") and amount:
                    nbytes[barrier][warp.number].append(amount)
                if kind == "copy":
                    copies[barrier][warp.number] += 1
        for barrier in {*arrive, *nbytes, *copies}:
            expected = [sum(of) for of in zip_longest(*nbytes[barrier].values(), fillvalue=0)]
            self._phases[program, barrier] = _Phases(len(arrive[barrier]), expected, copies[barrier])

    # --- events -------------------------------------------------------------------------------------------------------

    def _push(self, time: float, event: _Warp | Callable[[float], None]) -> None:
        """Let a warp go on, or call a function, at a time."""
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, event))

    def _go(self, warp: _Warp, now: float) -> None:
        """Issue instructions of a warp until another event comes first, or the warp waits for another warp."""
        queue = self._queue
        while True:
            if warp.position >= warp.stop and not self._enter_next(warp):
                self._finish(warp)
                return
            n = warp.position
            time = self._earliest(warp, n, now)
            if queue and queue[0][0] < time:
                self._push(time, warp)
                return
            now = warp.time = time
            later = self._execute(warp, n, now)
            if later is None:
                return
            now = later

    def _enter_next(self, warp: _Warp) -> bool:
        """Go to the next segment; False at the end."""
        warp.segment += 1
        if warp.segment >= len(warp.segments):
            return False
        segment = warp.segments[warp.segment]
        warp.position, warp.stop, (warp.effects, warp.off) = segment.start, segment.stop, _of(segment)
        warp.visits.append(warp.time)
        return True

    def _finish(self, warp: _Warp) -> None:
        self._ended += 1
        self._alive[warp.program] -= 1

    def _earliest(self, warp: _Warp, n: int, now: float) -> float:
        ready, quarter = warp.ready, warp.quarter
        time, issue = now, self._issue[quarter]
        if issue > time:
            time = issue
        for register in self._reads[n]:
            if register in ready and ready[register] > time:
                time = ready[register]
        if (unit := self._units_of[n]) and n not in warp.off:
            if (free := self._units[quarter][unit]) > time:
                time = free
            if unit == "shared" and self._port > time:
                time = self._port
        return time

    def _execute(self, warp: _Warp, n: int, now: float) -> float | None:
        """Issue an instruction; return the cycle at which the warp may issue its next one, None if the warp waits."""
        self._issue[warp.quarter] = now + 1
        warp.position += 1
        effect = warp.effects.get(n)
        if effect is not None:
            return self._synchronise(warp, effect, now)
        if n in warp.off:
            return now + 1
        instruction, work = self._code[n], self._works[n]
        if not self._waits_or_counts[n]:
            self._hold(warp, n, work, now)
            return now + _STALLS.get(instruction.name, 1)
        if instruction.name in ASYNCHRONOUS:
            self._multiply(warp, n, now)
            return now + 1
        if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            return self._await_products(warp, int(instruction.operands[-1], 16), now)
        if instruction.name in ("LDGDEPBAR", "UTMACMDFLUSH"):
            warp.copies.append(warp.pending_copies)
        if instruction.name == "DEPBAR" and len(instruction.operands) > 1:
            left = int(instruction.operands[1], 16)
            return max([now + 1, *warp.copies[: len(warp.copies) - left]])
        self._hold(warp, n, work, now)
        return now + _STALLS.get(instruction.name, 1)

    def _hold(self, warp: _Warp, n: int, work: Work, now: float) -> None:
        """Occupy the units of an instruction, and set the times of its results."""
        if work.unit != "issue":
            self._units[warp.quarter][work.unit] = now + work.cycles
        done = now + work.latency
        if work.shared:
            self._port = now + work.shared / rates.SHARED_BYTES
            done = self._port + work.latency
        if work.memory:
            self._memory = max(self._memory, now) + work.memory / self._bandwidth
            if self._code[n].name in _LOADS:
                done = self._memory + self._latency
            elif self._code[n].name == "LDGSTS":
                warp.pending_copies = self._memory + self._latency
        if self._code[n].name == "UTMASTG":
            warp.pending_copies = now + rates.TMA_LATENCY
        for register in self._writes[n]:
            warp.ready[register] = done

    # --- products -----------------------------------------------------------------------------------------------------

    def _multiply(self, warp: _Warp, n: int, now: float) -> None:
        group, number = warp.group, warp.products
        warp.products += 1
        if "gsb0" in self._code[n].operands:
            warp.groups.append(warp.products)
        group.issued[number] += 1
        if group.issued[number] == 4:
            del group.issued[number]
            self._compute(4 * self._works[n].tensor, now)
            group.ends.append(self._tensor + rates.PRODUCT_LATENCY)
            waiting, group.waiting = group.waiting, []
            for waiter in waiting:
                self._push(now, waiter)

    def _compute(self, cycles: float, now: float) -> None:
        """Occupy the tensor cores, after the products that wait for the tensor cores."""
        self._tensor = max(self._tensor, now) + cycles
        self._tensor_busy += cycles

    def _await_products(self, warp: _Warp, left: int, now: float) -> float | None:
        """Wait until all but `left` committed groups are computed."""
        done = len(warp.groups) - left
        if done <= 0:
            return now + 1
        products = warp.groups[done - 1]
        if len(warp.group.ends) < products:
            warp.position -= 1  # again, when the other warps have issued their products
            warp.group.waiting.append(warp)
            return None
        return max(now + 1, warp.group.ends[products - 1])

    # --- barriers -----------------------------------------------------------------------------------------------------

    def _synchronise(self, warp: _Warp, effect: Effect, now: float) -> float | None:
        n, kind, barrier, amount = effect
        if kind in ("join", "announce"):
            return self._join(warp, kind, barrier, amount, now)
        if kind == "multiply":
            self._compute((amount or 0) / self._gpu.flops, now)
            return now + 1
        if barrier is None:
            return now + 1
        phases = self._phases.setdefault((warp.program, barrier), _Phases(0))
        if kind == "init":
            before = warp.phases.setdefault(barrier, [0, 0])
            before[0], before[1] = before[0] + before[1], 0
        elif kind == "wait":
            return self._wait(warp, n, barrier, phases, amount, now)
        elif kind == "commit":
            self._push(max(now, self._tensor + rates.PRODUCT_LATENCY), lambda at: self._arrive(phases, at))
        elif kind == "copy":
            nbytes = phases.next_copy(warp.number)
            self._memory = max(self._memory, now) + nbytes / self._bandwidth
            self._push(self._memory + self._latency + rates.TMA_LATENCY, lambda at: self._land(phases, nbytes, at))
        else:
            phases.arrivals += kind == "arrive"
            phases.expected += amount or 0
            self._complete(phases, now)
        return now + 1

    def _arrive(self, phases: _Phases, now: float) -> None:
        phases.arrivals += 1
        self._complete(phases, now)

    def _land(self, phases: _Phases, nbytes: float, now: float) -> None:
        phases.landed += nbytes
        self._complete(phases, now)

    def _complete(self, phases: _Phases, now: float) -> None:
        while phases.advance():
            waiting, phases.waiting = phases.waiting, []
            for phase, warp in waiting:
                if phase <= phases.complete:
                    self._push(now + rates.SHARED_LATENCY, warp)
                else:
                    phases.waiting.append((phase, warp))

    def _wait(
        self, warp: _Warp, n: int, barrier: int | str, phases: _Phases, parity: int | None, now: float
    ) -> float | None:
        before = warp.phases.setdefault(barrier, [0, 0])
        if parity is not None and parity != before[1] % 2:
            phase = before[0] + before[1]  # the phase before the current one, which the warp has seen
        else:
            before[1] += 1
            phase = before[0] + before[1]
        for register in self._writes[n]:
            warp.ready[register] = now + rates.SHARED_LATENCY
        if phase <= phases.complete:
            return now + 1
        for register in self._writes[n]:
            warp.ready[register] = 0.0
        phases.waiting.append((phase, warp))
        return None

    def _join(self, warp: _Warp, kind: str, barrier: int | str | None, threads: int | None, now: float) -> float | None:
        here = self._joins[warp.program, barrier]
        count = threads // rates.WARP if threads else self._alive[warp.program]
        here.append(warp if kind == "join" else None)
        if len(here) < count:
            return None if kind == "join" else now + 1
        self._joins[warp.program, barrier] = []
        for waiter in here:
            if waiter is not None and waiter is not warp:
                self._push(now + rates.BARRIER_LATENCY, waiter)
        return now + (rates.BARRIER_LATENCY if kind == "join" else 1)
