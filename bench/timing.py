"""Timing of contestants under equal conditions: they take turns in one process, and medians of the rounds count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Contestant = Callable[[], Any]
"""Makes one call; returns arrays."""

Clock = Callable[[], float]
"""Makes one call; returns the seconds that it took."""


def medians(contestants: Mapping[str, Contestant], rounds: int = 7, pause: float = 0.1) -> dict[str, float]:
    """Median seconds of one call of each contestant, see `take_turns`."""
    times = take_turns({name: clock(call) for name, call in contestants.items()}, rounds, pause)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def take_turns(clocks: Mapping[str, Clock], rounds: int = 7, pause: float = 0.1) -> dict[str, list[float]]:
    """Seconds of one call of each contestant, in every round.

    Each round times every contestant once. Before a timed call it sleeps for `pause` seconds and makes an untimed call.
    Without these, a contestant pays for its predecessor: XLA frees a gigabyte of `jax.nn.dot_product_attention` while
    the next program already runs.
    """
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(rounds):
        for name, seconds in clocks.items():
            time.sleep(pause)
            seconds()
            times[name].append(seconds())
    return times


def clock(call: Contestant) -> Clock:
    """A clock for a contestant that runs in this process: it waits for the arrays of the call."""
    return lambda: _seconds(call)


def by_round(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within the rounds, which changes of the machine's speed between rounds do not affect."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def dispatch_medians(contestants: Mapping[str, Contestant], rounds: int = 100, calls: int = 100) -> dict[str, float]:
    """Median seconds of one call of each contestant, for calls of microseconds; each round times `calls` calls."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            jax.block_until_ready(call())
            times[name].append(
                _seconds(lambda call=call: [jax.block_until_ready(call()) for _ in range(calls)]) / calls
            )
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _seconds(call: Contestant) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start
