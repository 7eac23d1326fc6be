"""Shorter walks: of a loop that repeats itself, some iterations stand for all.

The number of iterations that are cut out is a multiple of the period in which an iteration's barriers repeat. It is the
same in all warps, so that arrivals and waits still match.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilekern.estimate.gpu.walk import Segment

MAX_PERIOD = 16
KEPT = 6
"""Iterations that are kept of each loop, at least: two before the cut, which fill the pipeline, and four after it."""

LEAD = 2


@dataclass(frozen=True)
class _Run:
    """The iterations of a loop in one warp, from one entry to the exit.

    Attributes:
      starts: number of the first segment of each iteration.
      period: iterations after which barriers and branches repeat.
      first: number of the first iteration of the longest stretch that repeats.
      last: number of the iteration after that stretch.
    """

    starts: tuple[int, ...]
    period: int
    first: int
    last: int


def loop_headers(walks: Sequence[Sequence[Segment]]) -> frozenset[int]:
    """The numbers of the first instructions of loops that some warp repeats."""
    return frozenset(segment.start for walk in walks for segment in walk if segment.again)


def iterations(walk: Sequence[Segment], headers: frozenset[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each entry of a loop its header, and the numbers of the segments at which its iterations begin.

    An inner loop does not interrupt the iterations of its outer loop.
    """
    open_entries: dict[int, list[int]] = {}
    for n, segment in enumerate(walk):
        if segment.start not in headers:
            continue
        if not segment.again and segment.start in open_entries:
            yield segment.start, tuple(open_entries.pop(segment.start))
        open_entries.setdefault(segment.start, []).append(n)
    for header, starts in open_entries.items():
        yield header, tuple(starts)


def shortened(walks: Sequence[Sequence[Segment]]) -> list[list[Segment]]:
    """The walks of a program's warps without the iterations that repeat others."""
    headers = loop_headers(walks)
    runs: defaultdict[tuple[int, int], dict[int, _Run]] = defaultdict(dict)
    for number, walk in enumerate(walks):
        entries: defaultdict[int, int] = defaultdict(int)
        for header, starts in iterations(walk, headers):
            if run := _run(walk, header, starts, headers):
                runs[header, entries[header]][number] = run
            entries[header] += 1
    removed: list[set[int]] = [set() for _ in walks]
    for key, (first, count) in _cuts(runs).items():
        for number, run in runs[key].items():
            removed[number].update(range(run.starts[first], run.starts[first + count]))
    return [[s for n, s in enumerate(walk) if n not in gone] for walk, gone in zip(walks, removed, strict=True)]


def _run(walk: Sequence[Segment], header: int, starts: tuple[int, ...], headers: frozenset[int]) -> _Run | None:
    """A run of an innermost loop; None for other loops, for few iterations, and if nothing repeats."""
    if len(starts) <= KEPT + 1:
        return None
    keys = [tuple(walk[a:b]) for a, b in pairwise(starts[1:])]
    if any(s.start in headers and s.start != header for key in keys for s in key):
        return None
    best = (0, 0, 0, 0)
    for period in range(1, MAX_PERIOD + 1):
        first, last = _stretch([a == b for a, b in zip(keys, keys[period:], strict=False)])
        best = max(best, (last - first, -period, first + 1, last + period + 1))
        if best[0] == len(keys) - period:
            break
    length, period, first, last = best
    return _Run(starts, -period, first, last) if length else None


def _stretch(same: list[bool]) -> tuple[int, int]:
    """The longest run of true values, as its start and its stop."""
    best, start = (0, 0), 0
    for n, value in enumerate([*same, False]):
        if not value:
            best = max(best, (start, n), key=lambda r: r[1] - r[0])
            start = n + 1
    return best


def _cuts(runs: dict[tuple[int, int], dict[int, _Run]]) -> dict[tuple[int, int], tuple[int, int]]:
    """For each run of a loop the first iteration to remove, and their number.

    Warps that run loops of their own, such as one that copies for the others, must all skip as much.
    """
    apart = len({frozenset(of_warps) for of_warps in runs.values()}) > 1
    together = math.lcm(*(run.period for of in runs.values() for run in of.values())) if apart else 1
    cuts: dict[tuple[int, int], tuple[int, int]] = {}
    for key, of_warps in runs.items():
        if len({len(run.starts) for run in of_warps.values()}) > 1:
            continue
        period = math.lcm(together, *(run.period for run in of_warps.values()))
        first = max(run.first for run in of_warps.values()) + LEAD
        last = min(run.last for run in of_warps.values())
        count = (last - first - max(KEPT - LEAD, period)) // period * period
        if count > 0:
            cuts[key] = first, count
    if apart and cuts:
        least = min(count for _, count in cuts.values())
        cuts = {key: (first, least) for key, (first, _) in cuts.items()}
    return cuts
