"""Tables of blocks that tilekern ships: the library's kernels, tuned by estimates at the sizes of their cases.

    python -m bench.tables                                    # all cases; goes on where it stopped
    python -m bench.tables matmul "softmax square" --targets cuda:sm_90,tpu:v5e --budget 60
    python -m bench.tables --write                            # the tables again, from the results so far
    python -m bench.tables --check                            # rows and results of kernels that have changed

A case is tuned for each of the kernels that the library's function calls for it. Each result is a line of
`results/tables.jsonl`, with or without a gain, so that a later run leaves it out. Results with a gain of at least
`GAIN`, whose programs spill no registers and warn of nothing, are rows of `tilekern/tables/<target>.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench.texts import function_of
from tilekern.errors import TilekernError
from tilekern.kernel.composite import called
from tilekern.kernel.instance import Instance
from tilekern.kernel.tuned import Entry, Key, Tuned, entry_of, fields_of, shipped_file, tuned
from tilekern.lower.target import resolve
from tilekern.tuning import Request, target_of
from tilekern.tuning.candidates import EMITTER, Settings
from tilekern.tuning.tune import Subject

GAIN = 1.05
"""The least gain, by the estimates, of a row: what schedules lose by less is near what models cannot tell."""

TARGETS = ("cuda:sm_90", "tpu:v5e", "tpu:v6e")
KERNELS = ("matmul", "flash_attention", "rms_norm", "softmax", "cross_entropy", "ragged_dot")
"""The functions of the library that are tuned, those that matter most first."""

RESULTS = Path(__file__).parent / "results" / "tables.jsonl"
"""A line for each kernel of a case on a target that was tuned."""


@dataclass(frozen=True)
class Problem:
    """A kernel that a function of the library calls for a case.

    Attributes:
      case: the function and the case, "matmul square".
      target: the name of the target.
      kernel: the kernel.
      key: the key of the call in shipped tables.
      operands: the types of its operands; arrays where their values decide how often a loop runs.
    """

    case: str
    target: str
    kernel: Instance
    key: Key
    operands: tuple[Any, ...]


def _cases() -> Iterator[tuple[str, str, Any]]:
    """For each case its title, the name of the function, and the case."""
    for name in KERNELS:
        for case in importlib.import_module(f"tilekern.kernels.{name}.cases").CASES:
            yield f"{name} {case.name}", name, case


def _titles() -> set[str]:
    return {*KERNELS, *(title for title, _, _ in _cases())}


def problems(names: Sequence[str], targets: Sequence[str]) -> Iterator[Problem]:
    """The kernels of the cases that are named, "matmul" or "matmul square", on targets; each once."""
    seen: set[Key] = set()
    for target in targets:
        for title, name, case in _cases():
            if not names or title in names or name in names:
                for problem in _of_case(title, name, case, target):
                    if problem.key not in seen:
                        seen.add(problem.key)
                        yield problem


def _of_case(title: str, name: str, case: Any, target: str) -> list[Problem]:
    """The kernels of a case, with the blocks of their schedules; none if the target refuses the case."""
    arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    resolved = target_of(target)
    try:
        with Tuned(shipped=False):
            jaxpr = jax.make_jaxpr(function_of(name, case))(*arrays)
            kernels = [kernel for kernel, _ in called(jaxpr, resolved) if kernel.tuning is not None]
        return [Problem(title, target, k, _key(k, target), _operands(k, case)) for k in kernels]
    except TilekernError as error:
        print(f"{title} on {target}: {error.summary}", file=sys.stderr)
        return []


def _operands(kernel: Instance, case: Any) -> tuple[Any, ...]:
    """The types of a kernel's operands; `ends` of groups is the case's random array itself."""
    names = [param.name for param in kernel.func().inputs]
    if "ends" not in names:
        return tuple(kernel.types)
    # Only the sizes are computed: XLA drops the arrays that no result needs.
    sizes = jax.jit(lambda key: case.arrays(key, jnp.bfloat16)[-1])(jax.random.key(0))
    ends = np.cumsum(np.asarray(sizes), dtype=np.int32)
    return tuple(ends if name == "ends" else t for name, t in zip(names, kernel.types, strict=True))


def _key(kernel: Instance, target: str) -> Key:
    """The key of a kernel for the target that its search has: with an open emitter only where there is a choice."""
    assert kernel.tuning is not None
    subject = Subject(kernel, tuple(kernel.types), Request(target_of(target), 1.0), None)
    return kernel.tuning.shipped_key(subject.target)


# --- results ----------------------------------------------------------------------------------------------------------


def results() -> list[dict[str, Any]]:
    """The lines of the file of results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def entries(lines: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The entries of results. A later result for a case, a kernel and its sizes replaces one for an older block IR."""
    latest: dict[Any, Entry] = {}
    for line in lines:
        if "entry" in line and not line["drawback"]:
            entry = entry_of(line["entry"])
            latest[line["case"], line["target"], replace(entry.key, ir="", versions=())] = entry
    return list(latest.values())


def is_row(entry: Entry) -> bool:
    """True for an entry with a gain over the settings of the schedule, which must have an estimate."""
    return entry.default_seconds is not None and entry.default_seconds >= GAIN * entry.seconds


def tune(problem: Problem, budget: float) -> dict[str, Any]:
    """The line of a problem: the entry, or the reason why there is none."""
    start = time.monotonic()
    line: dict[str, Any] = {"case": problem.case, "target": problem.target}
    try:
        with Tuned(shipped=False):
            request = Request(target_of(problem.target), budget, progress=False)
            row = Subject(problem.kernel, problem.operands, request, None).tuned(start + budget)
    except TilekernError as error:
        return {**line, "key": fields_of(problem.key), "refused": error.summary}
    entry = replace(row.entry, key=problem.key)
    drawback = _drawback(problem, row.outcome.best) if is_row(entry) else ""
    more = {"default": dict(row.own), "tried": row.outcome.tried, "drawback": drawback}
    return {**line, "entry": fields_of(entry), **more}


def _drawback(problem: Problem, best: Settings) -> str:
    """The reason why faster settings are not shipped, which the estimate may not see; "" if there is none."""
    settings, tuning = dict(best), problem.kernel.tuning
    assert tuning is not None
    target = resolve(problem.target, cast(str | None, settings.pop(EMITTER, None)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resources = tuning.varied(settings, target).lowered(target).compile().resources
    if resources.spills:
        return f"{resources.spills} bytes of spilled registers"
    return f"{caught[0].category.__name__}: {caught[0].message}".splitlines()[0] if caught else ""


def _is_done(problem: Problem, lines: Sequence[Mapping[str, Any]]) -> bool:
    """True if a result has the problem's key, and an estimate of the schedule's own settings or a refusal."""
    key, without = fields_of(problem.key), {"default_seconds": None}
    records = (line.get("entry", line.get("key", {})) for line in lines)
    return any(key.items() <= record.items() and not without.items() <= record.items() for record in records)


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables of all targets."""
    for target in TARGETS:
        file = shipped_file(target)
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        of_target = [entry for entry in entries(lines) if entry.key.target.partition("+")[0] == target]
        if rows := tuple(filter(is_row, of_target)):
            Tuned(rows).save(file)
        print(f"{file.name}: {len(rows)} rows of {len(of_target)} results")


def tuned_rows(target: str) -> tuple[Entry, ...]:
    """The rows that are shipped for a target."""
    file = shipped_file(target)
    return tuned(file).entries if file.is_file() else ()


def stale(targets: Sequence[str] = TARGETS) -> list[str]:
    """The rows that fit none of the kernels that the library's functions call for the cases they were made of.

    The version of the compiler does not count: a row of another version is a miss, and not wrong.
    """
    cases = {json.dumps(line["entry"], sort_keys=True): line["case"] for line in results() if "entry" in line}
    strays: list[str] = []
    for target in targets:
        for row in tuned_rows(target):
            case = cases.get(json.dumps(fields_of(row), sort_keys=True), "")
            name = case.partition(" ")[0]
            keys = [p.key for p in problems([case], [target])] if name in KERNELS else []
            if replace(row.key, versions=()) not in [replace(key, versions=()) for key in keys]:
                strays.append(f"{row.key.kernel} on {target}, {dict(row.key.extents)}: {case or 'of no result'}")
    return strays


def outdated(targets: Sequence[str] = TARGETS) -> list[str]:
    """The cases whose results are for another block IR or another schedule than a call has now: a run tunes them again.

    The versions of compilers do not count, as in `stale`.
    """
    lines = [line for line in results() if line["target"] in targets]
    called = problems([case for case in dict.fromkeys(line["case"] for line in lines) if case in _titles()], targets)
    keys = (
        [{name: field for name, field in fields_of(p.key).items() if name != "versions"} for p in called]
        if lines
        else []
    )
    records = [line.get("entry", line.get("key", {})) for line in lines]
    return [
        f"{line['case']} on {line['target']}"
        for line, record in zip(lines, records, strict=True)
        if not any(key.items() <= record.items() for key in keys)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, write or check, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__)
    parser.add_argument("names", nargs="*", help='functions, or a function and a case: "matmul square"')
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each kernel of a case")
    parser.add_argument("--write", action="store_true", help="only write the tables, from the results so far")
    parser.add_argument("--check", action="store_true", help="only list rows that fit no kernel; the exit code is 1")
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    if unknown := [name for name in options.names if name not in _titles()] + [t for t in targets if t not in TARGETS]:
        parser.error(f"no case or target of this name: {', '.join(unknown)}")
    if options.budget <= 0:
        parser.error("the budget is not above 0 seconds")
    if options.check:
        strays = stale(targets)
        print("\n".join(strays) or "all rows fit")
        print(
            "\n".join(f"outdated result: {case}" for case in outdated(targets)) or "all results are of today's kernels"
        )
        return 1 if strays else 0
    for problem in [] if options.write else problems(options.names, targets):
        if _is_done(problem, results()):
            continue
        line = tune(problem, options.budget)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(_said(line), flush=True)
    write(results())
    return 0


def _said(line: Mapping[str, Any]) -> str:
    if "refused" in line:
        return f"{line['case']} on {line['target']}: {line['refused']}"
    entry = entry_of(line["entry"])
    own, gain = entry.default_seconds, (entry.default_seconds or entry.seconds) / entry.seconds
    left_out = f", left out: {line['drawback']}" if line["drawback"] else ""
    times = f"{'refused' if own is None else f'{own * 1e6:.1f} µs'} → {entry.seconds * 1e6:.1f} µs, {gain:.2f}×"
    return f"{line['case']}, {entry.key.kernel} on {line['target']}: {times}, {line['tried']} tried{left_out}"


if __name__ == "__main__":
    raise SystemExit(main())
