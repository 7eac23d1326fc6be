"""The child process: it runs items in order, and writes each record to the journal at once."""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import Future

import jax
import jax.numpy as jnp

from bench.gpu import prepare
from bench.gpu.item import Item, Options, Record
from bench.gpu.journal import Journal
from bench.gpu.plan import Budget, items, missing
from bench.gpu.speed import Comparison, Dispatch
from tilekern.lower.target import on_platform

BROKEN = 3
"""Exit status of a child whose GPU stopped answering: a CUDA error stays until the process ends."""

NO_GPU = 4
"""Exit status if JAX sees no NVIDIA GPU."""

PREPARED_IN = 120.0  # seconds to wait for the preparation of one item; the first ones take longest


def work(options: Options) -> int:
    """Run all items that are not in the journal yet, and return the exit status."""
    if not _has_gpu():
        return NO_GPU
    journal, budget = Journal(options.out / "journal.jsonl"), Budget(options.seconds)
    todo = missing(items(options), list(journal.read()))
    target, parent = on_platform("cuda", None).full_name, os.getppid()
    with prepare.pool(options, todo, target) as futures:
        quiet = False
        for item in todo:
            if not quiet and isinstance(item, (Comparison, Dispatch)):
                _wait_for_all(futures)  # from here on, no preparation disturbs the timing
                quiet = True
            if not budget.affords(item):
                continue
            journal.begin(item.name)
            journal.end(item.name, _record(item, futures[item.name], options.seed))
            if os.getppid() != parent or not _healthy():  # the parent has ended, or the GPU is broken
                return BROKEN
    return 0


def _record(item: Item, future: Future[prepare.Ready], seed: int) -> Record:
    try:
        ready = future.result(timeout=PREPARED_IN)
        record: Record = {"programs": ready.programs} | ({"unprepared": ready.errors} if ready.errors else {})
        return record | item.run(seed, ready.prepared)
    except Exception as error:
        sys.stderr.write(f"{item.name}: {traceback.format_exc()}\n")
        return {"ok": False, "text": f"{type(error).__name__}: {error}"[:4000]}


def _wait_for_all(futures: dict[str, Future[prepare.Ready]]) -> None:
    for future in futures.values():
        future.exception(timeout=PREPARED_IN)


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return False


def _healthy() -> bool:
    """True if the GPU still computes for this process."""
    try:
        return bool(jax.block_until_ready(jnp.ones(8) + 1).sum() == 16)
    except Exception:
        return False
