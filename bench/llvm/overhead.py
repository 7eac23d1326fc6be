"""Overhead of a call: dispatch, and the first call."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.overhead import add
from bench.result import Result
from bench.timing import dispatch_medians

ROOT = Path(__file__).parents[2]
DISPATCH_LIMIT_US = 10.0
FIRST_CALL_LIMIT_S = 0.25


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is not None:
        yield dispatch()
        yield first_call()


def dispatch(rounds: int = 100, calls: int = 100) -> Result:
    """The time of a call of a jitted kernel that does next to nothing, less the time of a plain jitted function."""
    x, y = jnp.arange(8.0), jnp.ones(8)
    plain, ours = jax.jit(lambda x, y: x + y), jax.jit(lambda x, y: add(x, y, target="cpu:llvm"))
    seconds = dispatch_medians({"plain": lambda: plain(x, y), "ours": lambda: ours(x, y)}, rounds, calls)
    value, baseline = (seconds[who] * 1e6 for who in ("ours", "plain"))
    return Result(
        "llvm: dispatch, jitted, over a plain jitted function", "µs", value, DISPATCH_LIMIT_US, "difference", baseline
    )


def first_call(processes: int = 5) -> Result:
    """The first call of attention in a new process, see `first_call.py`; `jax.nn` is shown beside it."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(processes):
        for who, samples in seconds.items():
            command = [sys.executable, "-m", "bench.llvm.first_call", who]
            samples.append(float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout))
    value, baseline = (statistics.median(samples) for samples in seconds.values())
    return Result("llvm: first call of attention", "s", value, FIRST_CALL_LIMIT_S, "value", baseline)
