"""What needs no GPU, in parallel processes: programs are compiled into the cache on disk, oracles computed."""

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
from bench.gpu.item import Item, Options, Record
from tilekern.lower.target import resolve


@dataclass(frozen=True)
class Ready:
    """An item that can run.

    Attributes:
      prepared: what it made.
      programs: what each program of tilekern takes of the GPU.
      errors: why programs could not be compiled, or the rest not be prepared.
      seconds: how long all this took.
    """

    prepared: Any
    programs: list[Record]
    errors: list[str]
    seconds: float


def ready(item: Item, target: str, seed: int, oracles: bool = True) -> Ready:
    """Compile the programs of an item and prepare the rest. Whatever fails is only noted: the run will tell."""
    start, programs, errors, prepared = time.perf_counter(), [], [], None
    lowerings = item.lowerings(resolve(target), seed)
    while True:
        try:
            lowering = next(lowerings)
            programs.append(_described(lowering.compile().resources))
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
    """The items by name, being made ready in as many processes as there are cores."""
    workers = max(1, min(len(items), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_on_cpu) as executor:
        try:
            yield {i.name: executor.submit(_ready, options, i.name, target, oracles) for i in items}
        finally:
            executor.shutdown(cancel_futures=True)


def _on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")  # the GPU is the parent's


def _ready(options: Options, name: str, target: str, oracles: bool) -> Ready:
    (item,) = (item for item in plan.items(options) if item.name == name)
    return ready(item, target, options.seed, oracles)


def _described(resources: Any) -> Record:
    return asdict(resources)
