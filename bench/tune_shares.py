"""Shares of the best estimate that `tune` reaches on targets that are not here.

    python -m bench.tune_shares                                     # all cases; goes on where it stopped
    python -m bench.tune_shares "softmax square" --targets tpu:v5e --seconds 300
    python -m bench.tune_shares --table                             # the results so far

A case is tuned as `kernel.tune` does, with a budget. Then the blocks that the model takes for the fastest of all are
estimated one after the other, on GPUs with several numbers of warps and stages, for `--seconds` or until all are done.
Each case has a line of `results/tune_shares.jsonl`. The share is the least estimate, over that of `tune`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.library_cases import Case
from bench.tables import Problem, problems
from tilekern.kernel.tuned import Tuned
from tilekern.lower.target import device_of, resolve
from tilekern.tuning import Request, target_of
from tilekern.tuning.candidates import Settings
from tilekern.tuning.result import Row
from tilekern.tuning.tune import Subject

TARGETS = ("cuda:sm_90", "tpu:v5e")
CASES = ("softmax square", "matmul square", "flash_attention gpt2")
RESULTS = Path(__file__).parent / "results" / "tune_shares.jsonl"
_CHOICES = 64  # choices of blocks
_LAUNCH = {"num_warps": (8, 4), "num_stages": (3, 4, 2)}


def candidates(problem: Problem) -> list[Settings]:
    """The `_CHOICES` fastest choices of blocks by the model, each with all launch options."""
    case = Case(problem.case, problem.kernel, resolve(problem.target))
    choices = [dict(zip(case.names, sizes, strict=True)) for sizes in itertools.islice(case.by_speed(), _CHOICES)]
    if not device_of(case.target).emitter:
        return list(choices)
    options = [dict(zip(_LAUNCH, values, strict=True)) for values in itertools.product(*_LAUNCH.values())]
    return [{**blocks, **launch} for blocks in choices for launch in options]


def measured(problem: Problem, budget: float, seconds: float) -> dict[str, Any]:
    """The line of a case.

    Args:
      problem: the kernel of the case.
      budget: seconds for `tune`.
      seconds: for the estimates of `candidates`.
    """
    load, start = os.getloadavg()[0], time.monotonic()
    tuned = _searched(problem, budget)
    took, listed = time.monotonic() - start, candidates(problem)
    wide = _searched(problem, seconds, listed)
    best = min((tuned, wide), key=lambda row: row.outcome.seconds)
    return {
        "case": problem.case,
        "target": problem.target,
        "budget": budget,
        "took": round(took, 1),
        "load": round(load, 1),
        "schedule": tuned.outcome.own_seconds,
        "tune": tuned.outcome.seconds,
        "settings": dict(tuned.outcome.best),
        "tried": tuned.outcome.tried,
        "best": best.outcome.seconds,
        "best_settings": dict(best.outcome.best),
        "estimated": wide.outcome.tried + sum(wide.outcome.refused.values()),
        "candidates": len(listed),
    }


def _searched(problem: Problem, budget: float, listed: Sequence[Settings] | None = None) -> Row:
    with Tuned(shipped=False):
        request = Request(target_of(problem.target), budget, candidates=listed, progress=False)
        return Subject(problem.kernel, problem.operands, request, None).tuned(time.monotonic() + budget)


def lines() -> list[dict[str, Any]]:
    """The lines of the file of results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> None:
    """Print the share of each case."""
    print(f"{'case':24}{'target':12}{'schedule':>10}{'tune':>10}{'best':>10}{'share':>7}{'tried':>7}  estimated")
    for line in lines():
        times = "".join(f"{line[name] * 1e6:8.1f}µs" for name in ("schedule", "tune", "best"))
        estimated = f"{line['estimated']} of {line['candidates']}"
        share = f"{line['best'] / line['tune']:7.2f}{line['tried']:7}"
        print(f"{line['case']:24}{line['target']:12}{times}{share}  {estimated}, load {line['load']}")


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    cli = argparse.ArgumentParser(prog="python -m bench.tune_shares", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("cases", nargs="*", default=CASES, help='cases, such as "matmul square"')
    cli.add_argument("--targets", default=",".join(TARGETS))
    cli.add_argument("--budget", type=float, default=120.0, help="seconds for tune")
    cli.add_argument("--seconds", type=float, default=600.0, help="for the wide search of a case")
    cli.add_argument("--table", action="store_true", help="measure nothing")
    options = cli.parse_args(arguments)
    warnings.simplefilter("ignore")
    done = {(line["case"], line["target"]) for line in lines()}
    for problem in () if options.table else problems(options.cases or CASES, options.targets.split(",")):
        if (problem.case, problem.target) not in done:
            line = measured(problem, options.budget, options.seconds)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
    table()


if __name__ == "__main__":
    main(sys.argv[1:])
