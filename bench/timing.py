"""Timing that is fair to every contestant: all of them in one process, round by round, and medians at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Contestant = Callable[[], Any]


def medians(contestants: Mapping[str, Contestant], rounds: int = 7, pause: float = 0.1) -> dict[str, float]:
    """Median seconds of one call of each contestant, which must return arrays.

    Each round times every contestant once. Before that it sleeps `pause` seconds and makes an untimed call: XLA frees a
    gigabyte behind `jax.nn.dot_product_attention` while the next program runs, and that is not the next one's time.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            time.sleep(pause)
            jax.block_until_ready(call())
            times[name].append(_seconds(call))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def dispatch_medians(contestants: Mapping[str, Contestant], rounds: int = 100, calls: int = 100) -> dict[str, float]:
    """Median seconds of one call of each contestant, for calls of microseconds: a round makes `calls` of them."""
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
