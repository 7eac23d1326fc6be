"""Blocks that nobody chose, compared with the default of 128 and with the fastest of a sample of blocks.

`measure` times them on this machine's CPU. `python -m bench.blocks tpu:v6e 6` estimates them for a GPU or a TPU, beside
six drawn blocks for each kernel.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
import warnings
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
from tilekern.blocks import by_speed, model_of, tiling
from tilekern.errors import LargeProgramWarning, TilekernError
from tilekern.ir.core import Func
from tilekern.lower.target import backend_of, resolve

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
        chosen = _chosen(case, TARGET)
        best = min(_sample(case, arrays, (default, chosen)), key=lambda pair: pair[0])[1]
        runs = {who: _call(case, arrays, b) for who, b in (("default", default), ("model", chosen), ("best", best))}
        times = take_turns({who: clock(run) for who, run in runs.items()}, _ROUNDS, 0.02)
        ms = {who: statistics.median(samples) * 1e3 for who, samples in times.items()}
        title = f"blocks of {case.name}: the model's {_shown(chosen)}, the fastest {_shown(best)}"
        yield Result(title, "ms", ms["model"], LIMIT, "ratio", ms["best"], by_round(times["model"], times["best"]))
        title = f"blocks of {case.name}: the model's {_shown(chosen)}, default 128"
        yield Result(title, "ms", ms["model"], None, "ratio", ms["default"], by_round(times["model"], times["default"]))


def main(target: str = "tpu:v6e", count: str = "4") -> None:
    """Print microseconds by estimate: with all blocks 128, with the model's, and with the fastest drawn blocks."""
    warnings.simplefilter("error", LargeProgramWarning)  # refused: compiling these takes minutes
    model, ratios, ranks = model_of(resolve(target)), list[float](), list[float]()
    assert model is not None
    print(f"{'kernel':44}{'all 128':>10}{'model':>10}{'drawn':>10}  rank  blocks of the model, and the fastest drawn")
    for case in CASES:
        chosen, default = _chosen(case, target), dict.fromkeys(case.kernel.signature.blocks, 128)
        drawn = [blocks for blocks in _drawn(case)[: int(count)] if blocks not in (chosen, default)]
        times = [_estimated(case, target, blocks) for blocks in (default, chosen, *drawn)]
        modelled = [float(model(tiling(_func(case, blocks)))) for blocks in (default, chosen, *drawn)]
        best = min(range(2, len(times)), key=lambda n: times[n])
        pairs = [(ours, theirs) for ours, theirs in zip(modelled, times, strict=True) if theirs < float("inf")]
        ranks.append(float(np.corrcoef(*(np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)))[0, 1]))
        ratios.append(times[1] / min(times))
        row = "".join(f"{times[n] * 1e6:10.1f}" for n in (0, 1, best))
        print(f"{case.name[:43]:44}{row}  {ranks[-1]:+.2f}  {_shown(chosen)}, {_shown(drawn[best - 2])}", flush=True)
    print(f"model / fastest: median {statistics.median(ratios):.2f}, at most {max(ratios):.2f}")
    print(f"rank correlation with the estimates: median {statistics.median(ranks):.2f}")


def _estimated(case: Case, target: str, blocks: Mapping[str, int]) -> float:
    """Seconds by the estimate of the compiled program; infinite if the target refuses it."""
    try:
        return case.kernel.trace(*case.arguments, target=target, **blocks).lower(target).estimate().seconds
    except (TilekernError, LargeProgramWarning):
        return float("inf")


def _chosen(case: Case, target: str) -> dict[str, int]:
    """The blocks of the target's model."""
    model, start = model_of(resolve(target)), dict.fromkeys(case.kernel.signature.blocks, 128)
    assert model is not None
    takes_extents = backend_of(resolve(target)).takes_extents
    choices = by_speed(lambda blocks: [_func(case, blocks)], start, list(start), model, takes_extents=takes_extents)
    return next(choices)


def _func(case: Case, blocks: Mapping[str, int]) -> Func:
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
    """Pairs (seconds, blocks) of some blocks; slow ones are left after two calls."""
    end, fastest_yet = time.perf_counter() + _SECONDS, float("inf")
    for blocks in (*first, *_drawn(case)[:_SAMPLE]):
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


def _drawn(case: Case) -> list[dict[str, int]]:
    """Choices of blocks in a random order, which is the same each time."""
    names = case.kernel.signature.blocks
    sizes = [1 << n for n in range(2 if len(names) > 1 else 0, 13)]
    drawn = [dict(zip(names, row, strict=True)) for row in itertools.product(sizes, repeat=len(names))]
    random.Random(0).shuffle(drawn)
    return drawn


def _shown(blocks: Mapping[str, int]) -> str:
    return " × ".join(map(str, blocks.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
