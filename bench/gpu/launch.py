"""Launches without a GPU: each item runs on a pretended GPU, up to the numbers.

All of JAX, its CUDA plugin and jaxlib's launch code run as on a GPU. The pretended driver (`bench.gpu.pretended`)
checks each launch as NVIDIA's does, and executes no kernel. So this finds crashes, refused launches and errors of our
own before time on a GPU is spent, and no wrong number.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from bench.gpu import supervise
from bench.gpu.item import Item, Options, Record
from bench.gpu.journal import Journal
from bench.gpu.plan import Budget, items, missing
from bench.gpu.pretended.build import MissingError
from bench.gpu.pretended.install import check_requirements, install
from tilekern.lower.target import resolve

RECORD = "driver.jsonl"
"""The file of the driver's record, in the folder of the results."""


def run(options: Options) -> int:
    """Launch all items on a pretended GPU of `options.launch`, print failures, and return the exit status."""
    try:
        check_requirements()
    except MissingError as error:
        print(f"a pretended GPU needs {error}")
        return 1
    options = replace(options, out=options.out / "launch")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / RECORD).unlink(missing_ok=True)
    print(f"launching on a pretended GPU; log and records in {options.out}", flush=True)
    records = supervise.supervise(options)["items"]
    failed = {name: record for name, record in records.items() if not record or not record.get("ok")}
    for name, record in failed.items():
        print(f"FAIL {name}: {(record or {}).get('text', 'no result')}\n")
    left = len(missing(items(options), list(records)))
    launches = sum(record.get("launches", 0) for record in records.values() if record)
    print(f"{len(records)} items, {launches} launches for {options.launch}, {len(failed)} failures, {left} left out")
    return 1 if failed or left or not records else 0


def pretend(options: Options) -> None:
    """Make JAX of this process see a pretended GPU; its record goes to the folder of the results."""
    os.environ["PRETENDED_CAPABILITY"] = options.launch.removeprefix("cuda:sm_")
    os.environ["PRETENDED_RECORD"] = str(options.out / RECORD)
    jax.config.update("jax_platforms", "cuda,cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # NVIDIA's other libraries complain that they have no GPU
    install(options.out)


def work(options: Options) -> int:
    """Launch all items that are not in the journal yet; the child's part."""
    journal, budget = Journal(options.out / "journal.jsonl"), Budget(options.seconds)
    calls = _Calls(options.out / RECORD)
    for item in missing(items(options), list(journal.read())):
        if budget.affords(item):
            journal.begin(item.name)
            journal.end(item.name, launched(item, options, calls))
    return 0


class _Calls:
    """The calls that the driver records."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[Any]:
        """The calls that were recorded since the last `new`."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._offset)
                yield from map(json.loads, file)
                self._offset = file.tell()


def launched(item: Item, options: Options, calls: _Calls) -> Record:
    """Launch an item, and judge it by its exceptions and by the driver's record."""
    try:
        programs = {
            low.program.name for low in item.lowerings(resolve(options.launch), options.seed) if low.program.programs
        }
        item.launch(options.seed)
    except Exception as error:
        sys.stderr.write(f"{item.name}: {traceback.format_exc()}\n")
        list(calls.new())
        return {"ok": False, "text": f"{type(error).__name__}: {error}"[:4000]}
    return judged(programs, list(calls.new()))


def judged(programs: set[str], calls: Sequence[Any]) -> Record:
    """The record of an item; `ok` is True if the driver refused no call, and launched each of `programs`.

    Args:
      programs: the names of the programs that the item should launch.
      calls: the driver's records of calls.
    """
    refused = [call for call in calls if call.get("status")]
    launches = [call for call in calls if call["call"] == "launch" and call["described"]]
    absent = programs - {launch["function"] for launch in launches}
    text = "".join(f"the driver refused {json.dumps(call)}\n" for call in refused[:5])
    text += f"not launched: {', '.join(sorted(absent))}\n" if absent else ""
    return {"ok": not text, "text": text.strip(), "launches": len(launches)}
