"""Kernels of the library without their schedules: the blocks of the model of CPUs, against the fastest measured ones.

    python -m bench.library_blocks --seconds 170              # goes on where it stopped, for so long
    python -m bench.library_blocks "rms_norm square" softmax  # some cases, without the cases that have a result
    python -m bench.library_blocks --table                    # all results, their median and the worst

A case is one of `kernels/<name>/cases.py` in float32, on random arrays. Its kernel starts with all blocks 128, as in
`blocks.py`. The search begins with the blocks of the model, of the schedule, and 128; then it doubles and halves each
block of the fastest so far, until the neighbours of the fastest are timed or the time of the case is over. The fastest
ones, the model's and the schedule's then take turns. Each result is a line of `out/library_blocks.jsonl`.

Times are the processor's with one thread, so that other work on the machine matters little. They do not show how evenly
the programs of a call occupy several cores.

A line is for one choice of the model. If the model chooses other blocks, the case is timed again, beginning with the
fastest blocks of its older lines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.library_cases import Case, Sizes, cases
from bench.timing import by_round, take_turns
from tilekern.errors import TilekernError
from tilekern.lower.target import resolve

TARGET = resolve("cpu:llvm")
RESULTS = Path(__file__).parent / "out" / "library_blocks.jsonl"
MOST_BYTES = 140_000_000  # of all arrays of a case
LEAST_SECONDS = 100e-6  # of a call by the schedule; a shorter one is mostly its dispatch
_FINALISTS = 3  # fastest ones of the search that take turns with the model's
_CONTEST = 1.0  # seconds that they take turns, roughly
_ROUNDS = 5, 25  # at least and at most
_SLOW = 1.5  # × the fastest so far: such blocks are left after three timed calls

_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h


def timed_cases() -> Iterator[Case]:
    """The cases of at most `MOST_BYTES`, whose work does not depend on data."""
    return (case for case in cases(TARGET, jnp.float32) if case.nbytes <= MOST_BYTES and not case.depends_on_data)


def call(case: Case, blocks: Sizes) -> Callable[[], Any]:
    """A compiled call with these blocks on random arrays, which ran once."""
    program, _ = case.varied(blocks).program(TARGET)
    compiled = jax.jit(program).lower(*case.arrays).compile()
    jax.block_until_ready(compiled(*case.arrays))
    return partial(compiled, *case.arrays)


# --- a case -----------------------------------------------------------------------------------------------------------


def measured(case: Case, seconds: float, older: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of a case.

    Args:
      case: the case.
      seconds: the processor's time for the search.
      older: lines of the case for other choices of the model.
    """
    line = {"case": case.title, "names": case.names, "model": case.of_model, "schedule": case.of_schedule}
    timed = _searched(case, seconds, [tuple(older_line["best"]) for older_line in older if "best" in older_line])
    if timed[case.of_schedule][0] < LEAST_SECONDS:
        return {**line, "short": timed[case.of_schedule][0]}
    fastest = sorted(timed, key=lambda blocks: timed[blocks][0])[:_FINALISTS]
    contestants = dict.fromkeys((case.of_model, case.of_schedule, *fastest))
    rounds = round(_CONTEST / sum(timed[blocks][0] for blocks in contestants))
    clocks = {_shown(blocks): partial(_seconds, timed[blocks][1]) for blocks in contestants}
    times = take_turns(clocks, min(max(rounds, _ROUNDS[0]), _ROUNDS[1]), 0)
    ms = {blocks: statistics.median(samples) * 1e3 for blocks, samples in times.items()}
    best = min(contestants, key=lambda blocks: ms[_shown(blocks)])
    ratio = by_round(times[_shown(case.of_model)], times[_shown(best)])
    searched = {_shown(blocks): timed[blocks][0] * 1e3 for blocks in timed}
    return {**line, "best": best, "ratio": ratio, "ms": ms, "searched": searched}


type Timed = dict[Sizes, tuple[float, Callable[[], Any]]]


def _searched(case: Case, seconds: float, first: Sequence[Sizes]) -> Timed:
    """Seconds, and the call, of each choice of blocks that was tried."""
    timed: Timed = {}
    end = time.process_time() + seconds
    for blocks in dict.fromkeys((case.of_schedule, case.of_model, *first)):
        _time(case, blocks, timed)
    with suppress(TilekernError):
        _time(case, (128,) * len(case.names), timed)
    tried, programs = set(timed), {str(case.func(blocks)) for blocks in timed}
    while time.process_time() < end:
        fastest = sorted(timed, key=lambda blocks: timed[blocks][0])[:_FINALISTS]
        near = (blocks for place in fastest for blocks in _neighbours(place))
        untried = next((blocks for blocks in near if blocks not in tried), None)
        if untried is None:
            break
        tried.add(untried)
        with suppress(TilekernError):  # the target refuses these blocks
            program = str(case.func(untried))
            if program not in programs:
                programs.add(program)
                _time(case, untried, timed)
    return timed


def _time(case: Case, blocks: Sizes, timed: Timed) -> None:
    """Time a choice of blocks: the fastest of up to nine calls.

    Raises:
      TilekernError: the target refuses the blocks.
    """
    timed_call = call(case, blocks)
    samples = [_seconds(timed_call) for _ in range(3)]
    fastest = min((s for s, _ in timed.values()), default=float("inf"))
    while min(samples) < _SLOW * fastest and len(samples) < 9 and sum(samples) < 0.2:
        samples.append(_seconds(timed_call))
    timed[blocks] = min(samples), timed_call


def _seconds(timed_call: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(timed_call())
    return time.process_time() - start


def _neighbours(blocks: Sizes) -> Iterator[Sizes]:
    for step in (2.0, 0.5, 4.0, 0.25):
        for n, size in enumerate(blocks):
            yield (*blocks[:n], max(1, int(size * step)), *blocks[n + 1 :])


def _shown(blocks: Sizes) -> str:
    return " × ".join(map(str, blocks))


# --- the command line -------------------------------------------------------------------------------------------------


def lines() -> list[dict[str, Any]]:
    """The lines of the file of results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def latest() -> list[dict[str, Any]]:
    """The last line of each case that was long enough to be timed."""
    return [line for line in {line["case"]: line for line in lines()}.values() if "ratio" in line]


def table() -> None:
    """Print the last result of each case, the best first, then their median and the worst."""
    rows = sorted(latest(), key=lambda line: line["ratio"])
    for line in rows:
        model, best, schedule = (tuple(line[who]) for who in ("model", "best", "schedule"))
        ms = ", ".join(f"{_shown(b)}: {line['ms'][_shown(b)]:.3g} ms" for b in (model, best, schedule))
        print(f"{line['case']:38} {line['ratio']:5.2f}  {ms}")
    ratios = [line["ratio"] for line in rows]
    if ratios:
        print(f"{len(ratios)} cases, model / fastest: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


def _have_one_thread() -> None:
    """Let XLA have one thread."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    jax.devices()  # makes the threads, one for each core
    os.sched_setaffinity(0, cores)


def keep_memory() -> None:
    """Let freed memory stay in the process: to get its pages again would be timed, too. On Linux with glibc."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    cli = argparse.ArgumentParser(prog="python -m bench.library_blocks", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("names", nargs="*", help='functions or cases, such as softmax or "rms_norm square"; all without')
    cli.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    cli.add_argument("--search", type=float, default=4.0, help="seconds of the processor for the search of a case")
    cli.add_argument("--table", action="store_true", help="print the results so far")
    parsed = cli.parse_args(arguments)
    if parsed.table:
        table()
        return
    warnings.simplefilter("ignore")
    if sys.platform == "linux":
        _have_one_thread()
    keep_memory()
    RESULTS.parent.mkdir(exist_ok=True)
    end = time.monotonic() + parsed.seconds
    for case in timed_cases():
        if parsed.names and not {case.title, case.title.split()[0]} & set(parsed.names):
            continue
        older = [line for line in lines() if line["case"] == case.title]
        if any(tuple(line["model"]) == case.of_model or "short" in line for line in older):
            continue
        if time.monotonic() > end:
            print("not all cases have results", file=sys.stderr)
            return
        line = measured(case, parsed.search, older)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(case.title, f"{line.get('ratio', 0):.2f}", line.get("ms", "too short"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
