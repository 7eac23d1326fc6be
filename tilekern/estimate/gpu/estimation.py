"""The estimate: from SASS and a launch to cycles of a multiprocessor, and to the share of the peak."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from tilekern.estimate.gpu import rates
from tilekern.estimate.gpu.loops import loops_of
from tilekern.estimate.gpu.machine import Deadlock, Machine, Run
from tilekern.estimate.gpu.rates import GPUS, Gpu
from tilekern.estimate.gpu.sass import Listing, parse
from tilekern.estimate.gpu.scalar import Thread
from tilekern.estimate.gpu.shorten import shortened
from tilekern.estimate.gpu.walk import Segment, Walker
from tilekern.estimate.gpu.work import work

SAMPLES = 64
"""Programs of the grid whose loops are counted."""

GOLDEN = 0.6180339887498949
"""Multiples of GOLDEN, modulo 1, are spread evenly, and modulo any period, too: samples meet tiles of all positions."""

NEAR = 0.85
"""A line of at least this share of the cycles is called the bottleneck; below it, waiting is."""

LONGEST = 1500
"""Segments of a walk that are simulated at most; of longer ones, as many iterations of an outer loop as fit."""

SCHEDULED = 1 << 18
"""Programs whose start is simulated one by one; of larger grids the mean counts."""

# Products of tensor memory, which do not tell their size.
_PRODUCTS = ("UTCHMMA", "UTCQMMA")

_WAITS = ("wait", "join", "announce")

LINES = ("tensor", "mufu", "fma", "alu", "issue", "shared", "memory")


@dataclass(frozen=True)
class Launch:
    """The launch of a program.

    Attributes:
      programs: number of programs (thread blocks).
      warps: warps of a program.
      resident: programs that a multiprocessor holds at once.
      gpu: name of the GPU: "A100", "H100", "H200" or "B200".
      nbytes: bytes of all arrays, each counted once; None if not known: then all accesses go to the memory.
      grid: number of programs along x, y and z; by default all along x.
      cluster: thread blocks that share copies by multicast.
      trips: iterations of loops whose end depends on data, by label, with "" for all others.
      constants: 32-bit words of the constant bank (kernel arguments), by byte offset.
      function: name of the function, if the SASS has several.
      memory: contents of global memory, by the address of their first byte: arrays whose values decide branches.
    """

    programs: int
    warps: int
    resident: int = 1
    gpu: str = "H100"
    nbytes: float | None = None
    grid: tuple[int, int, int] | None = None
    cluster: int = 1
    trips: Mapping[str, int] = field(default_factory=dict[str, int])
    constants: Mapping[int, int] = field(default_factory=dict[int, int])
    function: str = ""
    memory: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(frozen=True)
class LaunchEstimate:
    """The estimate for one launch.

    Attributes:
      gpu: the GPU.
      lines: cycles for which each unit of a multiprocessor is busy with all programs of the launch, on average over
        multiprocessors, as if nothing ever waited: see `LINES`.
      cycles: estimate of the whole time, in cycles of the boost clock.
      flops: operations of matrix products.
      traffic: bytes that all programs load, and store by other ways than TMA: its boxes are not in the code.
      busy: part of the simulated time in which the tensor cores compute.
      unknown: operations that the model does not know, with their numbers in the code; only their issue counts.
      assumed: for each branch that depends on data, the assumption, "not taken", say.
      undecided: labels of loops that run as often as unknown data say.
      spent: by line of the Triton source the cycles for which its instructions keep units busy, of all units together,
        in the mean program; {} if the text names no lines.
    """

    gpu: Gpu
    lines: Mapping[str, float]
    cycles: float
    flops: float
    traffic: float
    busy: float
    unknown: Mapping[str, int]
    assumed: Mapping[str, str]
    undecided: frozenset[str] = frozenset()
    spent: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def seconds(self) -> float:
        """The whole time in seconds, at the boost clock."""
        return self.cycles / (self.gpu.ghz * 1e9)

    @property
    def share(self) -> float:
        """The share of the peak of dense bfloat16 products, 0 to 1."""
        return self.flops / (self.cycles * self.gpu.flops * self.gpu.cores)

    @property
    def bottleneck(self) -> str:
        """The name of the longest line; "waits, tensor", say, if that line is less than `NEAR` of the time."""
        longest = max(self.lines, key=lambda line: self.lines[line])
        return longest if self.lines[longest] >= NEAR * self.cycles else f"waits, {longest}"


def estimate(sass: str, launch: Launch) -> LaunchEstimate:
    r"""Estimate the time of a launch.

    Args:
      sass: text of NVIDIA's disassembler.
      launch: how it is launched, and on which GPU.

    Raises:
      ValueError: no such GPU, or code that cannot be followed.

    Example:
      >>> sass = "/*0000*/ MUFU.EX2 R1, R2 ;\n/*0010*/ MUFU.EX2 R3, R4 ;\n/*0020*/ EXIT ;"
      >>> estimate(sass, Launch(programs=132, warps=4)).lines["mufu"]
      16.0
    """
    if launch.gpu not in GPUS:
        raise ValueError(f"expected one of the GPUs {', '.join(GPUS)}; got gpu={launch.gpu!r}")
    gpu, listing = GPUS[launch.gpu], parse(sass, launch.function)
    return _costliest(listing, launch, gpu).estimate()


def _costliest(listing: Listing, launch: Launch, gpu: Gpu) -> _Estimation:
    """The estimation whose branches ahead, where unknown values decide them, go the way with more work.

    `work_of` counts a switch by its costliest branch, too. The slow path of a division has neither products nor
    accesses to memory: it is not taken. The branches are decided one by one, in the order in which walks come to them.
    """
    estimation, decided = _Estimation(listing, launch, gpu), set[str]()
    while branches := [branch for branch in estimation.ahead if branch not in decided]:
        decided.add(branches[0])
        try:
            with_jump = _Estimation(listing, launch, gpu, estimation.taken | {branches[0]})
        except ValueError:  # the code behind the jump cannot be followed
            continue
        estimation = max(estimation, with_jump, key=_Estimation.weight)
    return estimation


class _Estimation:
    def __init__(self, listing: Listing, launch: Launch, gpu: Gpu, taken: frozenset[str] = frozenset()) -> None:
        self.listing, self.launch, self.gpu, self.taken = listing, launch, gpu, taken
        self.works = [work(instruction, gpu) for instruction in listing.code]
        self.assumed: dict[str, str] = {}
        self.undecided = set[str]()
        self.executed = Counter[tuple[int, int]]()  # by first and last instruction, runs in all sampled programs
        self.samples = self._samples()

    def estimate(self) -> LaunchEstimate:
        launch, gpu, samples = self.launch, self.gpu, self.samples
        index = max(range(len(samples)), key=lambda n: sum(sum(c.values()) for c in samples[n][1]))
        program, counts = samples[index]
        walks = self._walks(program, counts)
        run, walks = self._run(walks, self._traffic(walks), cut=any(self._stops(counts)))
        loops = loops_of(walks, run.visits, gpu, self.works)
        durations = [max(run.cycles + loops.time(visits), 1.0) for _, visits in samples]
        uses = [loops.use(visits) for _, visits in samples]
        mean = {line: sum(use[line] for use in uses) / len(uses) for line in uses[0]}
        per_core = launch.programs / gpu.cores
        lines = {line: mean.get(line, 0.0) * per_core for line in LINES if line != "memory"}
        traffic = mean.get("memory", 0.0) * launch.programs * self._copied_once(walks)
        lines["memory"] = self._memory(traffic)
        return LaunchEstimate(
            gpu,
            lines,
            max(self._scheduled(durations, walks, run), *lines.values()),
            mean.get("flops", 0.0) * launch.programs,
            traffic,
            run.tensor / run.cycles if run.cycles else 0.0,
            Counter(i.name for i, w in zip(self.listing.code, self.works, strict=True) if not w.known),
            self.assumed,
            frozenset(self.undecided),
            self._spent(len(samples), {line: cycles / per_core for line, cycles in lines.items()}),
        )

    # --- walks --------------------------------------------------------------------------------------------------------

    @property
    def ahead(self) -> list[str]:
        """The branches ahead that unknown values decide and that may lead to more work, as `assumed` names them."""
        code, ran = self.listing.code, {n for start, stop in self.executed for n in range(start, stop)}
        places = {f"{i.opcode} at {i.address:#x}": n for n, i in enumerate(code) if i.name in ("BRA", "JMP")}
        branches = (branch for branch, how in self.assumed.items() if how == "not taken" and branch in places)
        return [b for b in branches if any(any(self._weight_of(n)) for n in self._reachable(places[b], ran))]

    def _reachable(self, branch: int, ran: Set[int]) -> set[int]:
        """The instructions that a taken branch may lead to before an instruction in `ran`, by their numbers."""
        code, reachable = self.listing.code, set[int]()
        pending = [self.listing.destination(code[branch])]
        while pending:
            n = pending.pop()
            if n in reachable or n in ran or n >= len(code):
                continue
            reachable.add(n)
            ends = not code[n].guard and code[n].name in ("BRA", "JMP", "EXIT", "RET")
            pending += [self.listing.destination(code[n])] if code[n].target and code[n].name != "BSSY" else []
            pending += [] if ends else [n + 1]
        return reachable

    def weight(self) -> tuple[float, ...]:
        """Matrix products, copies by TMA, and bytes of other accesses in the sampled programs."""
        runs = [(count, n) for (start, stop), count in self.executed.items() for n in range(start, stop)]
        weights = ([count * amount for amount in self._weight_of(n)] for count, n in runs)
        return tuple(map(sum, zip((0.0, 0.0, 0.0), *weights, strict=True)))

    def _weight_of(self, n: int) -> tuple[bool, bool, float]:
        """The part of `weight` of one instruction, by its number."""
        work_, name = self.works[n], self.listing.code[n].name
        return work_.flops > 0 or name in _PRODUCTS, name == "UTMALDG", work_.memory

    def _samples(self) -> list[tuple[int, list[Counter[int]]]]:
        """Sampled programs, each with its number, and for each of its warps the number of visits to each loop."""
        walker = self._walker(effects=False)
        programs = self.launch.programs
        count = min(programs, SAMPLES) if walker.depends_on_program else 1
        numbers = [int(GOLDEN * n % 1 * programs) for n in range(count)] if count < programs else range(programs)
        samples: list[tuple[int, list[Counter[int]]]] = []
        roles = list(range(self.launch.warps))  # for each warp one that goes the same way
        for number in numbers:
            visits: dict[int, Counter[int]] = {}
            tasks = None
            threads = self._threads(walker, number)
            for warp in dict.fromkeys(roles):
                walk = walker.walk(threads[warp], tasks=tasks)
                tasks = walk.stored if warp == 0 else tasks
                visits[warp] = walk.visits
                for segment in walk.segments:
                    self.executed[segment.start, segment.stop] += roles.count(warp)
                self.assumed |= walk.assumed
                self.undecided |= walk.undecided
            if not samples:
                roles = [next(w for w in visits if visits[w] == visits[warp]) for warp in visits]
            samples.append((number, [visits[role] for role in roles]))
        return samples

    def _walks(self, program: int, counts: list[Counter[int]]) -> list[list[Segment]]:
        """The segments of all warps of a program; only the beginning of long walks."""
        walker, stops = self._walker(), self._stops(counts)
        # The first warp stores the last tasks at its end, which a shortened walk does not come to.
        plain = self._walker(effects=False)
        tasks = plain.walk(self._threads(plain, program)[0]).stored
        threads = self._threads(walker, program)
        walks = [walker.walk(thread, stop, tasks) for thread, stop in zip(threads, stops, strict=True)]
        return [walk.segments for walk in walks]

    def _walker(self, effects: bool = True) -> Walker:
        return Walker(self.listing, self.launch.trips, effects, self.taken)

    def _stops(self, counts: list[Counter[int]]) -> list[tuple[int, int] | None]:
        """For each warp the header of the outermost loop and the iterations after which a long walk ends, or None."""
        total = max(count.total() for count in counts)
        outer = [min(((n, h) for h, n in count.items() if n >= 5), default=(0, 0)) for count in counts]
        most = max(n for n, _ in outer)
        if total <= LONGEST or any(n not in (0, most) for n, _ in outer):
            return [None] * len(counts)
        iterations = max(3, LONGEST * most // total)
        return [(header, iterations) if n else None for n, header in outer]

    def _threads(self, walker: Walker, program: int) -> list[Thread]:
        """The first thread of each warp of a program."""
        return walker.start(lambda warp, lane: self._thread(program, warp, lane), self.launch.warps)

    def _thread(self, program: int, warp: int, lane: int) -> Thread:
        launch = self.launch
        x, y, z = launch.grid or (launch.programs, 1, 1)
        threads = rates.WARP * launch.warps
        special = {
            "SR_TID.X": rates.WARP * warp + lane,
            "SR_TID.Y": 0,
            "SR_TID.Z": 0,
            "SR_CTAID.X": program % x,
            "SR_CTAID.Y": program // x % y,
            "SR_CTAID.Z": program // (x * y),
            "SR_LANEID": lane,
            "SR_CgaCtaId": 0,
        }
        # The launch's shape in the constant bank, as ptxas lays it out: threads, then programs, in three words each.
        first = 0x360 if self.gpu.capability >= 100 else 0
        shape = dict(zip(range(first, first + 24, 4), (threads, 1, 1, x, y, z), strict=True))
        return Thread(shape | dict(launch.constants), special, launch.memory)

    def _spent(self, samples: int, lines: Mapping[str, float]) -> Mapping[int, float]:
        """See `LaunchEstimate.spent`; `lines` are cycles of the mean program.

        Copies by TMA and products of tensor memory do not tell their size: they share what no other instruction has.
        """
        runs = [0.0] * len(self.listing.code)
        for (start, stop), count in self.executed.items():
            for n in range(start, stop):
                runs[n] += count / samples
        cycles, nbytes, tensor = list[float](), list[float](), list[float]()
        for count, work_ in zip(runs, self.works, strict=True):
            unit = work_.cycles / 4 if work_.unit in ("mufu", "fma", "alu") else 0.0
            cycles.append(count * (0.25 + unit + work_.shared / rates.SHARED_BYTES))
            nbytes.append(count * work_.memory)
            tensor.append(count * work_.tensor)
        names = [i.name for i in self.listing.code]
        copies = [count if name == "UTMALDG" else 0.0 for count, name in zip(runs, names, strict=True)]
        products = [count if name in _PRODUCTS else 0.0 for count, name in zip(runs, names, strict=True)]
        spent = defaultdict[int, float](float)
        memory = _divided(lines["memory"], nbytes, copies)
        for line, *parts in zip(
            self.listing.lines, cycles, memory, _divided(lines["tensor"], tensor, products), strict=True
        ):
            spent[line] += sum(parts)
        return spent if any(self.listing.lines) else {}

    # --- time ---------------------------------------------------------------------------------------------------------

    def _traffic(self, walks: Sequence[Sequence[Segment]]) -> float:
        """Bytes of global memory that one program moves, as far as it is simulated."""
        total = 0.0
        for walk in walks:
            for segment in walk:
                total += sum(amount or 0 for _, kind, _, amount in segment.effects if kind in ("arrive", "expect"))
                total += sum(self.works[n].memory for n in range(segment.start, segment.stop) if n not in segment.off)
        return total

    def _copied_once(self, walks: Sequence[Sequence[Segment]]) -> float:
        """The part of all bytes, 0 to 1, that is left where one copy serves all thread blocks of a cluster (multicast).

        Boxes of copies are taken to be of one size, which the code does not say, and other accesses to be few.
        """
        effects = (effect for walk in walks for segment in walk for effect in segment.effects)
        copies = Counter(bool(to_all) for _, kind, _, to_all in effects if kind == "copy")
        return (copies[False] + copies[True] / self.launch.cluster) / copies.total() if copies.total() else 1.0

    def _memory(self, traffic: float) -> float:
        """Cycles of the slower of L2 and HBM for the traffic of the whole launch."""
        gpu, launch = self.gpu, self.launch
        unique = traffic if launch.nbytes is None else min(traffic, launch.nbytes)
        hertz = gpu.ghz * 1e9
        return max(traffic / gpu.l2_bandwidth, unique / gpu.bandwidth) * hertz

    def _run(self, walks: list[list[Segment]], traffic: float, *, cut: bool) -> tuple[Run, list[list[Segment]]]:
        """The run of the programs that a multiprocessor holds, and the walks: shortened if barriers still match."""
        for some in (shortened(walks), walks):
            try:
                return self._machine(traffic).run([some] * self.launch.resident, cut=cut), some
            except Deadlock:
                continue
        self.assumed["barriers"] = "no warp waits: their arrivals could not be followed"
        free = [[replace(s, effects=tuple(e for e in s.effects if e[1] not in _WAITS)) for s in walk] for walk in walks]
        return self._machine(traffic).run([free] * self.launch.resident), free

    def _machine(self, traffic: float) -> Machine:
        """A multiprocessor whose memory is as fast as the mixture of HBM and L2 that the launch uses."""
        whole = traffic * self.launch.programs
        unique = 1.0 if self.launch.nbytes is None or not whole else min(1.0, self.launch.nbytes / whole)
        latency = rates.L2_LATENCY + unique * (rates.MEMORY_LATENCY - rates.L2_LATENCY)
        return Machine(self.gpu, self.listing.code, self.works, rates.PORT_BYTES, latency)

    def _scheduled(self, durations: list[float], walks: list[list[Segment]], run: Run) -> float:
        """Cycles until the last multiprocessor ends: each starts a new program when a program ends."""
        launch, slots = self.launch, self.gpu.cores * self.launch.resident
        if launch.programs > SCHEDULED:
            return sum(durations) / len(durations) * launch.programs / slots
        if len(durations) == 1:
            waves, last_programs = divmod(launch.programs, slots)
            few = -(-last_programs // self.gpu.cores)
            last = 0.0
            if few == launch.resident:
                last = durations[0]
            elif few:
                last = durations[0] * self._machine(self._traffic(walks)).run([walks] * few).cycles / run.cycles
            return waves * durations[0] + last
        ends = [0.0] * min(slots, launch.programs)
        for n in range(launch.programs):
            heapq.heapreplace(ends, ends[0] + durations[n % len(durations)])
        return max(ends)


def _divided(total: float, own: Sequence[float], unsized: Sequence[float]) -> list[float]:
    """Cycles divided among instructions: by `own`, or by the counts of `unsized` where there are such."""
    shares = unsized if any(unsized) else own
    whole = sum(shares)
    return [total * share / whole if whole else 0.0 for share in shares]
