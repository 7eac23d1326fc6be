"""Times of functions that take turns, so that noise of the machine meets each function alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax

from tilekern.errors import ArgumentError

SAMPLE = 2e-3
"""Seconds that a sample takes at least: many times the clock's resolution and a thread's wake-up."""


@dataclass(frozen=True)
class Benchmark:
    """The times of one function.

    Attributes:
      samples: seconds of a call, one for each round.
      against: seconds of a call of the other function in the same rounds; empty without one.
    """

    samples: tuple[float, ...]
    against: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def gain(self) -> float:
        """Time of the peer divided by time of the function: the median over rounds; 1 without a peer."""
        return statistics.median(map(_ratio, self.against, self.samples)) if self.against else 1.0

    @property
    def confidence(self) -> float:
        """The probability by a sign test that the function is not slower than its peer, 0 to 1."""
        return confidence(self.samples, self.against)

    def __str__(self) -> str:
        from tilekern.estimate.quantities import duration  # which imports all backends

        low, high = (sorted(self.samples)[int(part * (len(self.samples) - 1))] for part in (0.25, 0.75))
        text = f"{duration(self.seconds)} (quartiles {duration(low)}, {duration(high)}; {len(self.samples)} rounds)"
        if not self.against:
            return text
        return f"{text}, {self.gain:.2f} times as fast as the other, confidence {self.confidence:.2f}"


def benchmark(
    function: Callable[..., Any],
    *args: Any,
    against: Callable[..., Any] | None = None,
    rounds: int = 15,
    **keywords: Any,
) -> Benchmark:
    """The time of a call, in seconds: the median over rounds.

    A function is jitted and compiled first. A sample is a call, or as many calls as take 2 ms; the host waits for the
    last one. So on GPUs and TPUs the time of a launch counts only where calls are shorter than their launch. Arguments
    stay where they are: caches are warm as far as they hold them.

    Args:
      function: of arrays.
      *args: the arguments.
      against: another function of the same arguments. In each round each function has its turn.
      rounds: the number of samples of each function.
      **keywords: static arguments of both functions.

    Raises:
      tilekern.errors.ArgumentError: `rounds` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern import testing
      >>> times = testing.benchmark(jnp.sin, jnp.ones(1000), against=jnp.tan, rounds=3)
      >>> len(times.samples), times.seconds > 0
      (3, True)
    """
    if rounds < 1:
        raise ArgumentError(
            "a benchmark without rounds has no times",
            expected="rounds >= 1",
            got=f"rounds = {rounds}",
            fix="leave rounds out",
        )
    functions = [function] if against is None else [function, against]
    compiled = [jax.jit(partial(f, **keywords)).lower(*args).compile() for f in functions]
    samples = interleaved([partial(cast(Callable[..., Any], run), *args) for run in compiled], rounds)
    return Benchmark(tuple(samples[0]), tuple(samples[1]) if against is not None else ())


def interleaved(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round; a round has one sample of each.

    Each call runs once before the first round, and has its arrays in caches as far as the others leave them.
    """
    repeats = [max(1, math.ceil(SAMPLE / max(_sample(call, 1), 1e-7))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds):
        # Every second round goes backwards: else one would always run behind the same neighbour.
        numbers = range(len(calls))
        for number in numbers if round_ % 2 == 0 else reversed(numbers):
            samples[number].append(_sample(calls[number], repeats[number]))
    return samples


def _sample(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    results: Any = None
    for _ in range(repeats):
        results = call()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / repeats


def confidence(samples: Sequence[float], against: Sequence[float]) -> float:
    """The probability by a sign test that `samples` are not slower than `against`, taken in the same rounds.

    It is 1 - p, where p is the probability of at least as many faster rounds by fair coins. 0 without rounds.
    """
    wins = sum(x < y for x, y in zip(samples, against, strict=False))
    count = min(len(samples), len(against))
    return 1 - sum(math.comb(count, k) for k in range(wins, count + 1)) / 2**count if count else 0.0


def _ratio(against: float, sample: float) -> float:
    return against / sample
