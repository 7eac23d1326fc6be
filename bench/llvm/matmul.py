"""Matmul against XLA's own, and the machine's peak."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from bench.llvm.peak import host, peak, share
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels.matmul import matmul

SIZE = 2048
RATIO_LIMIT = 1.1


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is not None:
        for dtype in ("float32", "bfloat16"):
            yield from compare(SIZE, dtype)


def compare(size: int, dtype: str) -> Iterator[Result]:
    """The results of square matrices of a dtype."""
    x, w = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    ours, theirs, loop = jax.jit(partial(matmul, target="cpu:llvm")), jax.jit(jnp.matmul), peak(dtype)
    clocks = {"ours": clock(lambda: ours(x, w)), "theirs": clock(lambda: theirs(x, w))}
    if loop is not None:
        clocks = {"peak": loop.seconds} | clocks
    times = take_turns(clocks, rounds=11)
    name = f"llvm: matmul {size}³ {dtype}"
    value, baseline = (statistics.median(times[who]) * 1e3 for who in ("ours", "theirs"))
    of_xla = by_round(times["ours"], times["theirs"])
    yield Result(f"{name}, to XLA", "ms", value, RATIO_LIMIT, "ratio", baseline, of_xla)
    if loop is not None:
        yield share(f"{name}, of the peak", 2.0 * size**3, times["ours"], loop, times["peak"], None)
