"""`kernel.tune` with its budget of 60 s on `cpu:llvm`, against an exhaustive search.

    python -m bench.tuning                     # all cases
    python -m bench.tuning "matmul vit_b16_qkv"  # some

The exhaustive search compiles and times all combinations of powers of two, and of the extents, from `_LEAST` on
for each block, with the choices of the schedule. The fastest of one to three calls counts first. Then the `_NEAR`
fastest programs take turns. The `_FINALISTS` fastest ones are timed again, in turns with the blocks of `tune` and of
the schedule. The judged share is the time of the fastest finalist over the time with the blocks of `tune`.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from bench.library_blocks import call, keep_memory
from bench.library_cases import Case, Sizes, case_of
from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.errors import TilekernError
from tilekern.lower.target import resolve
from tilekern.tuning import Request, tune_called

CASES = ("softmax deepseek_v3_router", "matmul vit_b16_qkv", "flash_attention vit_b16")
SHARE = 0.97  # of the best, at least
BUDGET = 60.0  # seconds of `tune`
_LEAST = 16  # elements of a block of a longer axis
_SLOW = 1.5  # × the fastest so far: slower ones are timed once
_NEAR, _TURNS = 24, 7  # the fastest take turns so often
_FINALISTS, _ROUNDS = 4, 101


def measure(titles: Sequence[str] = CASES) -> Iterator[Result]:
    """All results of this file."""
    if host() is None:
        return
    keep_memory()
    for title in titles:
        case = _case(title)
        row = tune_called(case.kernel, Request(case.target, BUDGET, progress=False), time.monotonic() + BUDGET)
        tuned: Sizes = tuple(int(row.outcome.best[name]) for name in case.names)
        timed = _exhaustive(case)
        contestants = {**timed, tuned: call(case, tuned), case.of_schedule: call(case, case.of_schedule)}
        times = take_turns({_shown(b): clock(c) for b, c in contestants.items()}, _ROUNDS, 0)
        ms = {blocks: statistics.median(samples) * 1e3 for blocks, samples in times.items()}
        best = min(timed, key=lambda blocks: ms[_shown(blocks)])
        share = by_round(times[_shown(best)], times[_shown(tuned)])
        choices = f"{_shown(tuned)} of {row.outcome.tried} tried, the best {_shown(best)}, the schedule's"
        yield Result(
            f"tune of {title}: {choices} {_shown(case.of_schedule)} {ms[_shown(case.of_schedule)]:.3g} ms",
            "ms", ms[_shown(best)], SHARE, "share", ms[_shown(tuned)], share,
        )  # fmt: skip


def _case(title: str) -> Case:
    function, _, name = title.partition(" ")
    rows = importlib.import_module(f"tilekern.kernels.{function}.cases").CASES
    case = case_of(function, next(row for row in rows if row.name == name), resolve("cpu:llvm"), jnp.float32)
    assert case is not None
    return case


def _exhaustive(case: Case) -> Mapping[Sizes, Callable[[], Any]]:
    """Calls with the fastest blocks of all."""
    seconds: dict[Sizes, float] = {}
    programs = set[str]()
    for blocks in _all(case):
        try:
            program = str(case.func(blocks))
            if program not in programs:
                programs.add(program)
                seconds[blocks] = _fastest(clock(call(case, blocks)), min(seconds.values(), default=float("inf")))
        except TilekernError:
            continue
    near = sorted(seconds, key=lambda blocks: seconds[blocks])[:_NEAR]
    calls = {blocks: call(case, blocks) for blocks in near}
    times = take_turns({_shown(b): clock(c) for b, c in calls.items()}, _TURNS, 0)
    near.sort(key=lambda blocks: statistics.median(times[_shown(blocks)]))
    print(f"   {len(seconds)} programs timed, {len(near)} took turns", file=sys.stderr)
    return {blocks: calls[blocks] for blocks in near[:_FINALISTS]}


def _fastest(seconds: Callable[[], float], fastest: float) -> float:
    first = seconds()
    return first if first > _SLOW * fastest else min(first, seconds(), seconds())


def _all(case: Case) -> Iterator[Sizes]:
    """All combinations, the fastest by the model first, so that few slow ones are timed more than once."""
    combinations = list(case.by_speed())
    least = [min(_LEAST, max(sizes)) for sizes in zip(*combinations, strict=True)]
    return (blocks for blocks in combinations if all(b >= n for b, n in zip(blocks, least, strict=True)))


def _shown(blocks: Sizes) -> str:
    return " × ".join(map(str, blocks))


def main(titles: Sequence[str]) -> None:
    """Print the results of some cases."""
    warnings.simplefilter("ignore")
    for result in measure(titles or CASES):
        print(*(cell for cell in result.cells() if cell), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
