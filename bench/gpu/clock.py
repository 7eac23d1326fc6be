"""Timing on a GPU: contestants take turns, and the device's own events give their times.

JAX's programs are timed by XLA's profiler: CUPTI records the begin and end of every kernel and copy. A sample is the
time that the device was busy during a few calls, divided by their number. Dispatch by the host and gaps between kernels
do not count, so that calls of microseconds can be compared, too. PyTorch's programs are timed by CUDA events around as
many calls, because XLA's profiler need not see PyTorch's streams. Without device events the host's clock serves: the
time of 3 n calls less that of n calls, divided by 2 n, in which the cost of waiting cancels. This is wrong for calls
that take the host longer than the device, so each record names its method.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from bench.gpu.item import Record

ROUNDS = 9
WINDOW_SECONDS = 3e-3  # of work in one sample
MAX_CALLS = 16  # in one sample, which keeps all their results until its end
PAUSE = 1e-3  # seconds between samples, far more than the difference between the clocks of host and device
MARK = "bench.gpu sample "
# Names of statistics that XLA's profiler gives for kernels, copies, fills and CUDA graphs alone (xplane_schema.cc). In
# lower case, because it writes "Memset_details".
WORK = frozenset({"kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"})

Interval = tuple[float, float]


@dataclass
class Contestant:
    """One implementation in a comparison.

    Attributes:
      name: name in the tables.
      call: starts the work on one of the input sets and returns a handle for `wait`; does not wait.
      wait: waits for the end of the work.
      fetch: returns the result as a NumPy array.
      events: makes a CUDA event, for implementations outside of JAX; None for JAX, which the profiler times.
      samples: seconds of a call.
      method: "profiler", "events" or "host".
      kernels: names of the kernels that ran on the device, if known.
      error: reason why it is not timed.
    """

    name: str
    call: Callable[[int], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    fetch: Callable[[Any], np.ndarray] = np.asarray
    events: Callable[[], Any] | None = None
    samples: list[float] = field(default_factory=list)
    method: str = ""
    kernels: tuple[str, ...] = ()
    error: str = ""

    @property
    def median(self) -> float:
        """Median seconds of a call; NaN without samples."""
        return statistics.median(self.samples) if self.samples else math.nan

    def record(self) -> Record:
        """The record for the journal; times are microseconds."""
        if not self.samples:
            return {"error": self.error or "not measured"}
        micro = sorted(1e6 * s for s in self.samples)
        quartiles = statistics.quantiles(micro, method="inclusive") if len(micro) > 1 else micro * 3
        return {
            "median_us": quartiles[1],
            "quartiles_us": [quartiles[0], quartiles[2]],
            "samples_us": [round(s, 3) for s in micro],
            "method": self.method,
            "kernels": list(self.kernels),
        }


def measure(contestants: Sequence[Contestant], rounds: int = ROUNDS) -> None:
    """Take the samples of all contestants. A contestant that fails gets its `error`, and all others go on."""
    for contestant in contestants:
        with _noting(contestant):
            contestant.wait(contestant.call(0))
    able = [c for c in contestants if not c.error]
    calls = {c.name: _calls(c) for c in able}
    windows, device = _traced(able, calls, rounds)
    for index, contestant in enumerate(able):
        if contestant.error:
            continue
        by_round = [_within(windows.get((index, n)), device) for n in range(rounds)]
        contestant.kernels = tuple(dict.fromkeys(name for events in by_round for _, _, name in events))
        if contestant.events is None:
            _by_profiler(contestant, by_round, calls[contestant.name])


def by_host(contestant: Contestant, calls: int) -> float:
    """Seconds of a call by the host's clock."""
    few, many = _host_seconds(contestant, calls), _host_seconds(contestant, 3 * calls)
    return max(many - few, 0.0) / (2 * calls)


def _by_profiler(contestant: Contestant, by_round: Sequence[Sequence[tuple[float, float, str]]], calls: int) -> None:
    if all(by_round):
        contestant.method = "profiler"
        contestant.samples = [1e-9 * busy([(a, b) for a, b, _ in events]) / calls for events in by_round]
        return
    contestant.method = "host"
    with _noting(contestant):
        contestant.samples = [by_host(contestant, calls) for _ in by_round]


def _calls(contestant: Contestant) -> int:
    """Number of calls in a sample: as many as take `WINDOW_SECONDS`, from 1 to `MAX_CALLS`."""
    seconds = _host_seconds(contestant, 2) / 2
    return max(1, min(MAX_CALLS, math.ceil(WINDOW_SECONDS / max(seconds, 1e-6))))


def _host_seconds(contestant: Contestant, calls: int) -> float:
    start = time.perf_counter()
    contestant.wait([contestant.call(n) for n in range(calls)])
    return time.perf_counter() - start


def _traced(
    contestants: Sequence[Contestant], calls: dict[str, int], rounds: int
) -> tuple[dict[tuple[int, int], Interval], list[tuple[float, float, str]]]:
    """Run all rounds under the profiler; return the window of each sample, and the device's events, in ns."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 1, 0
    with TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for n in range(rounds):
                for index, contestant in enumerate(contestants):
                    if not contestant.error:
                        with _noting(contestant), jax.profiler.TraceAnnotation(f"{MARK}{index} {n}"):
                            _sample(contestant, calls[contestant.name])
                    time.sleep(PAUSE)
        finally:
            jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        return windows_of(planes), device_events_of(planes)


def _sample(contestant: Contestant, calls: int) -> None:
    if contestant.events is None:
        contestant.wait([contestant.call(n) for n in range(calls)])
        return
    begin, end = contestant.events(), contestant.events()
    begin.record()
    results = [contestant.call(n) for n in range(calls)]
    end.record()
    contestant.wait(results)
    contestant.method = "events"
    contestant.samples.append(begin.elapsed_time(end) * 1e-3 / calls)  # milliseconds


def windows_of(planes: Sequence[Any]) -> dict[tuple[int, int], Interval]:
    """The window of each sample, begin and end in nanoseconds, by the index of the contestant and the round."""
    windows: dict[tuple[int, int], Interval] = {}
    for event in (
        e for plane in planes if plane.name.startswith("/host:") for line in plane.lines for e in line.events
    ):
        if event.name.startswith(MARK):
            index, n = map(int, event.name.removeprefix(MARK).split())
            windows[index, n] = (event.start_ns, event.start_ns + event.duration_ns)
    return windows


def device_events_of(planes: Sequence[Any]) -> list[tuple[float, float, str]]:
    """The GPU's work: begin and end in nanoseconds, and name, of each kernel, without CUPTI's overhead."""
    lines = (line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines)
    return [
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in lines
        for event in line.events
        if any(name.lower() in WORK for name, _ in event.stats)
    ]


def _within(window: Interval | None, device: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The events whose middle lies in a window, extended by half a pause on both sides."""
    if window is None:
        return []
    slack = 0.5e9 * PAUSE
    return [e for e in device if window[0] - slack <= (e[0] + e[1]) / 2 <= window[1] + slack]


def busy(intervals: Sequence[Interval]) -> float:
    """The length of the union of intervals, in their unit."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _noting(contestant: Contestant) -> Iterator[None]:
    """Turn an exception into the contestant's error: peers refuse some sizes, and are missing on some machines."""
    try:
        yield
    except Exception as error:
        contestant.error = f"{type(error).__name__}: {error}"[:500]
        contestant.samples = []
