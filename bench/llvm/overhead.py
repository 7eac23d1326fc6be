"""Overhead of a call: dispatch, and the first call."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp

from bench.llvm import first_call
from bench.llvm.peak import host
from bench.overhead import add
from bench.result import Result
from bench.timing import dispatch_medians

ROOT = Path(__file__).parents[2]
DISPATCH_LIMIT_US = 10.0
# What `first_call.py` measures: its name, and its limit with machine code on disk, in seconds; of imports a ratio.
FIRST_CALLS: Mapping[str, tuple[str, float | None]] = {
    "attention": ("first call of attention", 0.25),
    "gradient": ("first call of attention's gradient", None),
    "lowering": ("lowering of the gradient of two layers", 1.5),
    "import": ("import of tilekern, against import of jax", 1.1),
}


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is not None:
        yield dispatch()
        yield from first_calls()


def dispatch(rounds: int = 100, calls: int = 100) -> Result:
    """The time of a call of a jitted kernel that does next to nothing, less the time of a plain jitted function."""
    x, y = jnp.arange(8.0), jnp.ones(8)
    plain, ours = jax.jit(lambda x, y: x + y), jax.jit(lambda x, y: add(x, y, target="cpu:llvm"))
    seconds = dispatch_medians({"plain": lambda: plain(x, y), "ours": lambda: ours(x, y)}, rounds, calls)
    value, baseline = (seconds[who] * 1e6 for who in ("ours", "plain"))
    return Result(
        "llvm: dispatch, jitted, over a plain jitted function", "µs", value, DISPATCH_LIMIT_US, "difference", baseline
    )


def first_calls(processes: int = 5) -> Iterator[Result]:
    """First calls in new processes, see `first_call.py`, without and with machine code on disk; JAX is shown beside."""
    for work in first_call.WORK:
        name, limit = FIRST_CALLS[work]
        with TemporaryDirectory() as folder:
            caches = {"": folder} if work == "import" else {", nothing on disk": "off", ", code on disk": folder}
            seconds = _take_turns(work, caches, processes)
        for label in caches:
            judged = limit if label != ", nothing on disk" else None
            value, baseline = (statistics.median(seconds[who, label]) for who in ("ours", "theirs"))
            relation = "ratio" if work == "import" else "value"
            yield Result(f"llvm: {name}{label}", "s", value, judged, relation, baseline)


def _take_turns(work: str, caches: Mapping[str, str], processes: int) -> dict[tuple[str, str], list[float]]:
    """Seconds by contestant and cache, in each process; the first process of all fills the caches and is not timed."""
    contestants = [(who, label) for label in caches for who in ("ours", "theirs")]
    seconds: dict[tuple[str, str], list[float]] = {contestant: [] for contestant in contestants}
    for number in range(processes + 1):
        for who, label in contestants:
            command = [sys.executable, "-m", "bench.llvm.first_call", who, work]
            environment = {**os.environ, "TILEKERN_CACHE": caches[label]}
            printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, env=environment).stdout
            seconds[who, label] += [float(printed.split()[0])] if number else []
    return seconds
