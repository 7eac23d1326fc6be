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
import importlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern.kernels
from bench.texts import function_of
from bench.timing import by_round, take_turns
from tilekern.blocks import by_speed, model_of
from tilekern.blocks.choose import BodyError
from tilekern.errors import TilekernError
from tilekern.estimate.data_loops import data_loops
from tilekern.ir.control import Switch
from tilekern.ir.core import Func
from tilekern.kernel.composite import called
from tilekern.kernel.instance import Instance
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

type Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A case of a function of the library that runs one kernel with blocks.

    Attributes:
      title: the function and the case, "rms_norm square".
      kernel: the kernel with the blocks of its schedule.
    """

    title: str
    kernel: Instance

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks."""
        assert self.kernel.tuning is not None
        return tuple(self.kernel.tuning.signature.blocks)

    @property
    def of_schedule(self) -> Sizes:
        """The blocks of the schedule."""
        return tuple(int(self._settings[name]) for name in self.names)

    @cached_property
    def of_model(self) -> Sizes:
        """The blocks of the model, by which all blocks may change: the fastest that the target takes."""
        model = model_of(TARGET)
        assert model is not None
        start = dict.fromkeys(self.names, 128)
        for sizes in by_speed(self._funcs, start, self.names, model, takes_extents=True):
            blocks = tuple(sizes.get(name, 128) for name in self.names)
            if not self._is_refused(blocks):
                return blocks
        raise AssertionError("the schedule's blocks are not refused, and the model has more choices than these")

    @cached_property
    def arrays(self) -> Sequence[jax.Array]:
        """Random operands: standard normal, integers 0 or 1."""
        random = np.random.default_rng(0)
        return [
            jnp.asarray(random.integers(0, 2, t.shape), t.dtype)
            if jnp.issubdtype(t.dtype, jnp.integer) or t.dtype == bool
            else jnp.asarray(random.standard_normal(t.shape, np.float32)).astype(t.dtype)
            for t in self.kernel.types
        ]

    def program(self, blocks: Sizes) -> str:
        """The block IR with these blocks; the same for blocks that are longer than their axes."""
        return str(self._varied(blocks).func(TARGET))

    def call(self, blocks: Sizes) -> Callable[[], Any]:
        """A compiled call with these blocks, which ran once."""
        program, _ = self._varied(blocks).program(TARGET)
        compiled = jax.jit(program).lower(*self.arrays).compile()
        jax.block_until_ready(compiled(*self.arrays))
        return partial(compiled, *self.arrays)

    @property
    def _settings(self) -> Mapping[str, Any]:
        assert self.kernel.tuning is not None
        return self.kernel.tuning.settings(TARGET)

    def _varied(self, blocks: Sizes) -> Instance:
        assert self.kernel.tuning is not None
        return self.kernel.tuning.varied({**self._settings, **dict(zip(self.names, blocks, strict=True))}, TARGET)

    def _funcs(self, blocks: Mapping[str, Any]) -> list[Func]:
        try:
            return [self._varied(tuple(blocks[name] for name in self.names)).func(TARGET)]
        except TilekernError as error:
            raise BodyError from error

    def _is_refused(self, blocks: Sizes) -> bool:
        try:
            self._varied(blocks).lowered(TARGET)
        except TilekernError:
            return True
        return False


def cases() -> Iterator[Case]:
    """The cases of at most `MOST_BYTES`, whose work does not depend on data: the first of each function, and so on."""
    folders = sorted(path.parent.name for path in Path(tilekern.kernels.__path__[0]).glob("*/cases.py"))
    of_function = {name: importlib.import_module(f"tilekern.kernels.{name}.cases").CASES for name in folders}
    for number in range(max(map(len, of_function.values()))):
        for name, of_name in of_function.items():
            if number < len(of_name):
                yield from _case(name, of_name[number])


def _case(name: str, case: Any) -> Iterator[Case]:
    types = jax.eval_shape(partial(case.arrays, dtype=jnp.float32), jax.random.key(0))
    kernels = [kernel for kernel, _ in called(jax.make_jaxpr(function_of(name, case))(*types), TARGET)]
    if len(kernels) != 1 or kernels[0].tuning is None or not kernels[0].tuning.signature.blocks:
        return
    func = kernels[0].func(TARGET)
    nbytes = sum(math.prod(p.ref.shape) * p.ref.dtype.itemsize for p in func.params)
    depends_on_data = bool(data_loops(func)) or any(type(op) is Switch for op in func.walk())
    if nbytes <= MOST_BYTES and not depends_on_data:
        yield Case(f"{name} {case.name}", kernels[0])


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
    tried, programs = set(timed), set(map(case.program, timed))
    while time.process_time() < end:
        fastest = sorted(timed, key=lambda blocks: timed[blocks][0])[:_FINALISTS]
        near = (blocks for place in fastest for blocks in _neighbours(place))
        untried = next((blocks for blocks in near if blocks not in tried), None)
        if untried is None:
            break
        tried.add(untried)
        with suppress(TilekernError):  # the target refuses these blocks
            program = case.program(untried)
            if program not in programs:
                programs.add(program)
                _time(case, untried, timed)
    return timed


def _time(case: Case, blocks: Sizes, timed: Timed) -> None:
    """Time a choice of blocks: the fastest of up to nine calls.

    Raises:
      TilekernError: the target refuses the blocks.
    """
    call = case.call(blocks)
    samples = [_seconds(call) for _ in range(3)]
    fastest = min((s for s, _ in timed.values()), default=float("inf"))
    while min(samples) < _SLOW * fastest and len(samples) < 9 and sum(samples) < 0.2:
        samples.append(_seconds(call))
    timed[blocks] = min(samples), call


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(call())
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


def _calm() -> None:
    """Let XLA have one thread, and let freed memory stay in the process: to get its pages again would be timed, too."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    jax.devices()  # makes the threads, one for each core
    os.sched_setaffinity(0, cores)
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
        _calm()
    RESULTS.parent.mkdir(exist_ok=True)
    end = time.monotonic() + parsed.seconds
    for case in cases():
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
