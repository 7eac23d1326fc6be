"""Ranks of blocks: the analytic models against the estimates of compiled programs, without the hardware.

    python -m bench.model_ranks                                          # all cases; goes on where it stopped
    python -m bench.model_ranks --cases matmul "softmax square" --targets tpu:v5e
    python -m bench.model_ranks --table                                  # the results so far, by today's models

A case is a call of a library function in bfloat16, without its schedule. Its candidates are the blocks of the schedule,
the blocks of the model, and random blocks of which the model's time is at most `_FACTOR` times its least time. A
candidate that the target refuses is left out. Each case has a line of `results/model_ranks.jsonl` with its
candidates and their estimates. The seconds of the models are computed anew for each table.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.library_cases import Case, Sizes, case_of
from tilekern.errors import LargeProgramWarning, TilekernError
from tilekern.estimate.by_target import estimate
from tilekern.lower.target import resolve

TARGETS = ("cuda:sm_90", "tpu:v5e", "tpu:v6e")
CASES = (
    "softmax square",
    "rms_norm llama3_8b",
    "layer_norm gpt2",
    "group_norm stable_diffusion_64",
    "causal_conv1d mamba_130m",
    "matmul square",
    "flash_attention gpt2",
    "linear_attention mamba2_130m",
)
RESULTS = Path(__file__).parent / "results" / "model_ranks.jsonl"
_COUNT = 8  # candidates of a case
_FACTOR = 16.0
_PATIENCE = 60  # seconds for the estimate of a candidate


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient: the correlation of ranks; equal numbers have the mean of their ranks.

    NaN if all numbers of a sequence are equal.

    Example:
      >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
      0.8
    """
    a, b = (_ranks(np.asarray(numbers, float)) for numbers in (first, second))
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return round(float(a @ b / norm), 12) if norm else float("nan")


def _ranks(numbers: Any) -> Any:
    """Ranks from 0; the mean of the ranks of equal numbers."""
    lower = (numbers[None, :] < numbers[:, None]).sum(axis=1)
    return lower + ((numbers[None, :] == numbers[:, None]).sum(axis=1) - 1) / 2


# --- a case -----------------------------------------------------------------------------------------------------------


def case_titled(title: str, target: str) -> Case | None:
    """A case of the library on a target; None if it has no single kernel with blocks there."""
    name, case_name = title.split()
    of_name = importlib.import_module(f"tilekern.kernels.{name}.cases").CASES
    case = next(case for case in of_name if case.name == case_name)
    return case_of(name, case, resolve(target), jnp.bfloat16)


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """The line of a case: its candidates, each with the seconds of its estimate.

    Args:
      case: the case.
      seconds: no candidate is begun later.
    """
    end, candidates = time.monotonic() + seconds, list[tuple[Sizes, float]]()
    programs = set[str]()
    for blocks in drawn(case):
        if len(candidates) == _COUNT or time.monotonic() > end:
            break
        program = str(case.func(blocks))  # the same for blocks that are longer than their axes
        if program in programs:
            continue
        programs.add(program)
        if (estimated := _estimated(case, blocks)) is not None:
            candidates.append((blocks, estimated))
    return {"case": case.title, "target": case.target.name, "names": case.names, "candidates": candidates}


def drawn(case: Case) -> Iterator[Sizes]:
    """The candidates: the schedule's blocks, the model's, then all others of a similar speed in a random order."""
    ordered = list(case.by_speed())
    seconds = {blocks: case.modelled(blocks) for blocks in itertools.islice(_shuffled(ordered), 60)}
    fastest = min(seconds.values())
    near = [blocks for blocks in seconds if seconds[blocks] <= _FACTOR * fastest]
    random.Random(0).shuffle(near)
    yield from dict.fromkeys((case.of_schedule, case.of_model, *near))


def _shuffled(ordered: Sequence[Sizes]) -> list[Sizes]:
    """The choices in a random order, which is the same each time."""
    shuffled = list(ordered)
    random.Random(0).shuffle(shuffled)
    return [ordered[0], *shuffled]


def _estimated(case: Case, blocks: Sizes) -> float | None:
    """Seconds by the estimate of the compiled program; None if the target refuses it, or if it takes too long."""

    def give_up(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE)
    try:
        lowering = case.lowered(blocks)
        return estimate(lowering, case.target, [None] * len(case.kernel.types), {}).seconds
    except (TilekernError, LargeProgramWarning, TimeoutError) as error:
        print(f"  {blocks}: {str(error).splitlines()[0] if str(error) else 'takes too long'}"[:120], file=sys.stderr)
        return None
    finally:
        signal.alarm(0)


# --- the command line -------------------------------------------------------------------------------------------------


def lines() -> list[dict[str, Any]]:
    """The lines of the file of results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(titles: Sequence[str], targets: Sequence[str], candidates: bool) -> None:
    """Print the coefficient of each case and target, and the time of the model's first candidate over the fastest's."""
    print(f"{'case':34}{'target':12}{'number':>7}{'rank':>7}{'first / fastest':>17}")
    coefficients: dict[str, list[float]] = {}
    for line in lines():
        if line["target"] not in targets or not _is_selected(line["case"], titles):
            continue
        case = case_titled(line["case"], line["target"])
        assert case is not None
        blocks = [tuple(sizes) for sizes, _ in line["candidates"]]
        if not blocks:
            continue
        modelled, estimated = [case.modelled(b) for b in blocks], [seconds for _, seconds in line["candidates"]]
        coefficient = spearman(modelled, estimated)
        coefficients.setdefault(line["target"], []).append(coefficient)
        first = estimated[int(np.argmin(modelled))] / min(estimated)
        print(f"{line['case']:34}{line['target']:12}{len(blocks):7}{coefficient:+7.2f}{first:17.2f}")
        if candidates:
            for seconds, ours, sizes in sorted(zip(estimated, modelled, blocks, strict=True)):
                print(f"  {seconds * 1e6:10.1f} µs, by the model {ours * 1e6:10.1f} µs, {ours / seconds:5.2f}  {sizes}")
    for target, of_target in coefficients.items():
        print(f"{target}: median {statistics.median(of_target):.2f}, least {min(of_target):.2f}")


def _is_selected(title: str, titles: Sequence[str]) -> bool:
    return not titles or title in titles or title.split()[0] in titles


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    cli = argparse.ArgumentParser(prog="python -m bench.model_ranks", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--cases", nargs="*", default=(), help='functions or cases, such as softmax or "rms_norm square"')
    cli.add_argument("--targets", default=",".join(TARGETS))
    cli.add_argument("--seconds", type=float, default=120.0, help="for the candidates of a case on a target")
    cli.add_argument("--table", action="store_true", help="estimate nothing")
    cli.add_argument("--candidates", action="store_true", help="show the candidates of each case, too")
    parsed = cli.parse_args(arguments)
    targets = parsed.targets.split(",")
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", LargeProgramWarning)  # refused: compiling these takes minutes
    done = {(line["case"], line["target"]) for line in lines()}
    for title, target in itertools.product(() if parsed.table else CASES, targets):
        if (title, target) in done or not _is_selected(title, parsed.cases):
            continue
        if (case := case_titled(title, target)) is None:
            print(f"{title} on {target}: no single kernel with blocks", file=sys.stderr)
            continue
        line = measured(case, parsed.seconds)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{title} on {target}: {len(line['candidates'])} candidates", file=sys.stderr, flush=True)
    table(parsed.cases, targets, parsed.candidates)


if __name__ == "__main__":
    main(sys.argv[1:])
