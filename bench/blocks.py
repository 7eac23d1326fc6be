"""Blocks that nobody chose, compared with the default of 128 and with the fastest of a sample of blocks."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.llvm.peak import host
from bench.plain_kernels import CASES, Case
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.blocks import fastest
from tilekern.blocks.on_cpu import seconds

LIMIT = 2.0  # × the fastest, at worst
TARGET = "cpu:llvm"
_SAMPLE = 40  # blocks that are drawn for each kernel
_SECONDS = 20.0  # for the sample of one kernel
_ROUNDS = 9


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is None:
        return
    for case in CASES:
        arrays = _arrays(case)
        default = dict.fromkeys(case.kernel.signature.blocks, 128)
        chosen = fastest(partial(_func, case), default, list(default), seconds)
        best = min(_sample(case, arrays, (default, chosen)), key=lambda pair: pair[0])[1]
        runs = {who: _call(case, arrays, b) for who, b in (("default", default), ("model", chosen), ("best", best))}
        times = take_turns({who: clock(run) for who, run in runs.items()}, _ROUNDS, 0.02)
        ms = {who: statistics.median(samples) * 1e3 for who, samples in times.items()}
        title = f"blocks of {case.name}: the model's {_shown(chosen)}, the fastest {_shown(best)}"
        yield Result(title, "ms", ms["model"], LIMIT, "ratio", ms["best"], by_round(times["model"], times["best"]))
        title = f"blocks of {case.name}: the model's {_shown(chosen)}, default 128"
        yield Result(title, "ms", ms["model"], None, "ratio", ms["default"], by_round(times["model"], times["default"]))


def _func(case: Case, blocks: Mapping[str, int]) -> Any:
    return case.kernel.trace(*case.arguments, **blocks).ir


def _arrays(case: Case) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.integers(0, 32000, t.shape), t.dtype)
        if jnp.issubdtype(t.dtype, jnp.integer)
        else jnp.asarray(generator.standard_normal(t.shape, np.float32)).astype(t.dtype)
        for t in case.arguments
    ]


def _call(case: Case, arrays: list[jax.Array], blocks: Mapping[str, int]) -> Any:
    return partial(jax.jit(partial(case.kernel, target=TARGET, **blocks)), *arrays)


def _sample(
    case: Case, arrays: list[jax.Array], first: tuple[Mapping[str, int], ...]
) -> Iterator[tuple[float, Mapping[str, int]]]:
    """Pairs (seconds, blocks) of some blocks, drawn the same each time; slow ones are left after two calls."""
    names = case.kernel.signature.blocks
    sizes = [1 << n for n in range(2 if len(names) > 1 else 0, 13)]
    drawn = [dict(zip(names, row, strict=True)) for row in itertools.product(sizes, repeat=len(names))]
    random.Random(0).shuffle(drawn)
    end, fastest_yet = time.perf_counter() + _SECONDS, float("inf")
    for blocks in (*first, *drawn[:_SAMPLE]):
        if time.perf_counter() > end:
            return
        call = _call(case, arrays, blocks)
        try:
            samples = [clock(call)() for _ in range(3)][1:]
        except Exception:  # blocks that the target refuses
            continue
        if min(samples) < 2 * fastest_yet:
            samples += [clock(call)() for _ in range(6)]
        fastest_yet = min(fastest_yet, *samples)
        yield min(samples), blocks


def _shown(blocks: Mapping[str, int]) -> str:
    return " × ".join(map(str, blocks.values()))
