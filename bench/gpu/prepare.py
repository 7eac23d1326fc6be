"""Preparation without a GPU, in parallel processes: programs are compiled into the disk cache, oracles are computed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import jax

from bench.gpu import plan
from bench.gpu.estimates import described
from bench.gpu.item import Item, Options, Record
from tilekern.lower.target import resolve


@dataclass(frozen=True)
class Ready:
    """A prepared item.

    Attributes:
      prepared: result of `Item.prepare`.
      programs: for each program of tilekern its `Resources` as a dict; in a dry run with its estimate.
      errors: failures to compile a program, or to prepare the item.
      seconds: time of the preparation.
    """

    prepared: Any
    programs: list[Record]
    errors: list[str]
    seconds: float


def ready(item: Item, target: str, seed: int, oracles: bool = True) -> Ready:
    """Compile the programs of an item and prepare it. Failures are recorded; the run fails by itself.

    Without oracles it is a dry run: programs come with the estimate of the cycle model, where it knows the target.
    """
    start, programs, errors, prepared = time.perf_counter(), [], [], None
    lowerings = item.lowerings(resolve(target), seed)
    while True:
        try:
            lowering = next(lowerings)
            compiled = lowering.compile()
            programs.append(asdict(compiled.resources) | ({} if oracles else described(lowering, compiled)))
        except StopIteration:
            break
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    try:
        prepared = item.prepare(seed) if oracles else None
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return Ready(prepared, programs, errors, time.perf_counter() - start)


@contextmanager
def pool(
    options: Options, items: Sequence[Item], target: str, oracles: bool = True
) -> Iterator[dict[str, Future[Ready]]]:
    """A context that prepares items in a process for each core that this one may use, and has their futures by name."""
    workers = max(1, min(len(items), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_on_cpu) as executor:
        try:
            yield {i.name: executor.submit(_ready, options, i.name, target, oracles) for i in items}
        finally:
            executor.shutdown(cancel_futures=True)


def _on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")  # the parent uses the GPU


def _ready(options: Options, name: str, target: str, oracles: bool) -> Ready:
    (item,) = (item for item in plan.items(options) if item.name == name)
    return ready(item, target, options.seed, oracles)
