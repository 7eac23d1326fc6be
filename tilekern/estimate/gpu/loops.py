"""Loops of simulated walks: time and work of an iteration, from which follow other numbers of iterations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tilekern.estimate.gpu.rates import Gpu
from tilekern.estimate.gpu.shorten import iterations, loop_headers
from tilekern.estimate.gpu.walk import Segment
from tilekern.estimate.gpu.work import Work

Use = Counter[str]
"""Cycles of a multiprocessor's units by line, and "flops" and "memory" (bytes). Values are floats."""


@dataclass(frozen=True)
class Loops:
    """The loops of a program's warps.

    Attributes:
      counts: for each warp, the iterations of its loops in the simulated walks.
      times: for each warp and loop, by header, cycles of an iteration, without the cycles of inner loops.
      uses: for each warp and loop, by header, the work of an iteration, without the work of inner loops.
      simulated: the work of the simulated walks.
    """

    counts: list[Counter[int]]
    times: list[dict[int, float]]
    uses: list[dict[int, Use]]
    simulated: Use

    def time(self, counts: Sequence[Counter[int]]) -> float:
        """Cycles to add to the simulated cycles, for iterations by warp; warps run side by side, so the most counts."""
        return max(
            (
                sum((counts[warp][header] - own[header]) * t for header, t in self.times[warp].items())
                for warp, own in enumerate(self.counts)
            ),
            key=abs,
            default=0.0,
        )

    def use(self, counts: Sequence[Counter[int]]) -> dict[str, float]:
        """The work of a program, by line, with so many iterations by warp."""
        total = defaultdict[str, float](float, self.simulated)
        for warp, own in enumerate(self.counts):
            for header, use in self.uses[warp].items():
                for line, amount in use.items():
                    total[line] += (counts[warp][header] - own[header]) * amount
        return total


def loops_of(
    walks: Sequence[Sequence[Segment]], visits: Sequence[Sequence[float]], gpu: Gpu, works: Sequence[Work]
) -> Loops:
    """The loops of simulated walks, measured.

    Args:
      walks: segments of each warp.
      visits: for each warp the cycles at which its segments began.
      gpu: the GPU.
      works: the work of the function's instructions on the GPU.
    """
    headers = loop_headers(walks)
    cache: dict[Segment, Use] = {}

    def use(segment: Segment) -> Use:
        if segment not in cache:
            cache[segment] = _use(segment, works, gpu)
        return cache[segment]

    counts, times, uses = list[Counter[int]](), list[dict[int, float]](), list[dict[int, Use]]()
    simulated: Use = Counter()
    for walk, at in zip(walks, visits, strict=False):
        own = Counter(segment.start for segment in walk if segment.start in headers)
        time, work = _measured(walk, at, headers, use)
        counts.append(own)
        times.append(time)
        uses.append(work)
        for segment in walk:
            simulated.update(use(segment))
    return Loops(counts, times, uses, simulated)


def _measured(
    walk: Sequence[Segment], at: Sequence[float], headers: frozenset[int], use: Callable[[Segment], Use]
) -> tuple[dict[int, float], dict[int, Use]]:
    """Cycles and work of an iteration of each loop of a warp, by header, innermost loops first."""
    times: dict[int, float] = {}
    uses: dict[int, Use] = {}
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for header, starts in iterations(walk, headers):
        spans[header] += list(pairwise(starts))
    for header in sorted(spans, key=lambda h: min((b - a for a, b in spans[h]), default=0)):
        if not spans[header]:
            continue
        # The usual iteration, not one with a mask; the first one of an entry fills the pipeline.
        keys = [tuple(map(_kind, walk[a:b])) for a, b in spans[header]]
        usual, _ = Counter(keys).most_common(1)[0]
        chosen = [span for span, key in zip(spans[header], keys, strict=True) if key == usual]
        chosen = chosen[1:] if len(chosen) > 2 else chosen
        spent, work = list[float](), Counter[str]()
        for a, b in chosen:
            spent.append(at[b] - at[a])
            for segment in walk[a:b]:
                work.update(use(segment))
                if segment.start in times and segment.start != header:
                    spent[-1] -= times[segment.start]
                    work.subtract(uses[segment.start])
        times[header] = max(0.0, _typical(spent))
        uses[header] = Counter({line: amount / len(chosen) for line, amount in work.items()})
    return times, uses


def _typical(spent: Sequence[float]) -> float:
    """Cycles of an iteration: the median of means of neighbours, since some loops alternate.

    A mean would be wrong: a warp that copies ahead waits in one of its iterations until other warps end an iteration
    of their outer loop, and that time is the outer loop's.
    """
    return median([(a + b) / 2 for a, b in pairwise(spent)] or spent)


def _kind(segment: Segment) -> tuple[object, ...]:
    """A key that is equal for segments of the same work, whatever the addresses of their barriers."""
    return segment.start, segment.stop, segment.off, tuple(kind for _, kind, _, _ in segment.effects)


def _use(segment: Segment, works: Sequence[Work], gpu: Gpu) -> Use:
    use: defaultdict[str, float] = defaultdict(float)
    off = frozenset(segment.off)
    for n in range(segment.start, segment.stop):
        use["issue"] += 0.25
        if n in off:
            continue
        work = works[n]
        if work.unit in ("mufu", "fma", "alu"):
            use[work.unit] += work.cycles / 4
        use["tensor"] += work.tensor
        use["shared"] += work.shared / 128
        use["memory"] += work.memory
        use["flops"] += work.flops
    for _, kind, _, amount in segment.effects:
        if kind in ("arrive", "expect"):
            use["memory"] += amount or 0
        elif kind == "multiply":
            use["flops"] += amount or 0
            use["tensor"] += (amount or 0) / gpu.flops
    return Counter(use)
