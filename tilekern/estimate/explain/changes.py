"""Changes of blocks and launch options that would help: each is compiled, and estimated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tilekern.errors import TilekernError
from tilekern.estimate.explain.explanation import Change
from tilekern.estimate.result import Estimate
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target, backend_of

SMALLEST_GAIN = 1.02
"""A smaller gain is below what the models can tell."""

_MOST = 3
_LARGEST = {"num_warps": 16, "num_stages": 7}
_OTHER_OPTIONS = ("num_ctas", "maxnreg")
_LIMITS = {"CPU": (1.0, 2.0)}  # a trial takes some 20 to 200 ms there
_LIMIT = 10.0, 15.0  # where a compiler takes a second for each
"""Seconds for trials, and for a whole explanation."""


@dataclass(frozen=True)
class Variants:
    """The kernel with other settings.

    Attributes:
      settings: its blocks and launch options.
      lower: lowers it with some settings replaced.
    """

    settings: Mapping[str, int]
    lower: Callable[[Mapping[str, int]], Lowering]


@dataclass(frozen=True)
class Trials:
    """The changes that were tried.

    Attributes:
      changes: the changes that make the estimate shorter, best first.
      tried: how many compiled.
      refused: by change the first line of the error.
      untried: the changes for which the time did not suffice, "block_m = 128".
    """

    changes: tuple[Change, ...] = ()
    tried: int = 0
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    untried: tuple[str, ...] = ()


def default_budget(target: Target, spent: float) -> float:
    """Seconds for trials on a target, where nobody says a number.

    Args:
      target: the target.
      spent: the seconds that the kernel's own estimate took. The last trial may take twice as long: the program of a
        block of twice the size can be twice as long.
    """
    trials, whole = _LIMITS.get(backend_of(target).hardware, _LIMIT)
    return max(0.0, min(trials, whole - 3 * spent))


def try_changes(variants: Variants, now: Estimate, estimate: Callable[[Lowering], Estimate], budget: float) -> Trials:
    """Try single changes, one after the other, until the time is used up.

    Args:
      variants: the kernel with other settings.
      now: the estimate with its own settings.
      estimate: the estimate of a lowered variant.
      budget: seconds; a trial that has begun is finished.
    """
    changes: list[Change] = []
    refused: dict[str, str] = {}
    untried: list[str] = []
    tried, end = 0, time.monotonic() + budget
    for name, after in _candidates(variants.settings):
        if time.monotonic() >= end:
            untried.append(f"{name} = {after}")
            continue
        try:
            forecast = estimate(variants.lower({name: after}))
        except TilekernError as error:
            refused[f"{name} = {after}"] = error.summary
            continue
        tried += 1
        gain = now.seconds / forecast.seconds if forecast.seconds else 1.0
        if gain >= SMALLEST_GAIN:
            changes.append(Change(name, variants.settings[name], after, forecast.seconds, gain))
    best = sorted(changes, key=lambda change: -change.gain)
    return Trials(tuple(best[:_MOST]), tried, refused, tuple(untried))


def _candidates(settings: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Changes (name, value) of one setting: first all larger values, the double, then all smaller ones, the half.

    `num_stages` changes by 1. {"block_m": 64, "num_stages": 3} -> ("block_m", 128), ("num_stages", 4), ("block_m", 32),
    ("num_stages", 2).
    """
    for double in (True, False):
        for name, value in settings.items():
            if name in _OTHER_OPTIONS:
                continue
            step = 1 if name == "num_stages" else value
            after = value + step if double else value - step if name == "num_stages" else value // 2
            if 1 <= after <= _LARGEST.get(name, after) and after != value:
                yield name, after
