"""Softmax and RMS norm against the same formula under `jax.jit`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import jax

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels.rms_norm import reference as naive_rms_norm
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.softmax import softmax

SIZE = 4096
RATIO_LIMIT = 1.0


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is not None:
        yield from compare(SIZE)


def compare(size: int) -> Iterator[Result]:
    """The results of a square array."""
    x = jax.random.normal(jax.random.key(0), (size, size))
    weight = jax.random.normal(jax.random.key(1), (size,))
    yield _time("softmax", softmax, jax.nn.softmax, x)
    yield _time("rms_norm", rms_norm, naive_rms_norm, x, weight)


def _time(name: str, kernel: object, formula: object, *arrays: jax.Array) -> Result:
    ours, theirs = jax.jit(partial(kernel, target="cpu:llvm")), jax.jit(formula)
    times = take_turns({"ours": clock(lambda: ours(*arrays)), "theirs": clock(lambda: theirs(*arrays))}, rounds=15)
    value, baseline = (statistics.median(times[who]) * 1e3 for who in ("ours", "theirs"))
    name = f"llvm: {name} {arrays[0].shape[0]}² float32, to XLA"
    return Result(name, "ms", value, RATIO_LIMIT, "ratio", baseline, by_round(times["ours"], times["theirs"]))
