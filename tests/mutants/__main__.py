"""The command line: see `tests.mutants`."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests import repeats
from tests.mutants import matrix, reach
from tests.mutants.drawn import ROOMS, drawn
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutant import Mutant
from tests.mutants.near import by_imports
from tests.mutants.summary import own_lines, summary
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]

RESULTS = Path(__file__).with_name("results.jsonl")

# The status of pytest where a test failed.
_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status: 1 if a mutant survives."""
    made = argparse.ArgumentParser(prog="python -m tests.mutants", description="plant faults, and run their tests")
    made.add_argument("--only", default="", metavar="REGEX", help="mutants whose name it occurs in")
    made.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    made.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at once (default: 2)")
    made.add_argument("--tests", type=Path, default=ROOT, metavar="TREE", help="another tree, whose tests are run")
    made.add_argument("--fuzz", type=float, metavar="MINUTES", help="let the fuzzer find the faults, instead of tests")
    made.add_argument("--plants", action="store_true", help="those that modes of the fuzzer must find by themselves")
    made.add_argument("--record", action="store_true", help="run the tests, and record the lines that each one reaches")
    made.add_argument("--drawn", type=int, metavar="N", help="N drawn faults, instead of those by hand")
    made.add_argument("--rooms", default="", metavar="A,B", help="the rooms of drawn faults; by default all")
    made.add_argument("--first", action="store_true", help="let the first test that fails end the tests of a fault")
    made.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="a line of JSON for each drawn fault"
    )
    made.add_argument("--limit", type=float, default=900, metavar="S", help="seconds of tests for a drawn fault")
    made.add_argument("--full", action="store_true", help="run the tests of `make test-full`, for faults that survive")
    made.add_argument("--summary", action="store_true", help="sum up the results, and run nothing")
    made.add_argument("--repeats", action="store_true", help="list tests that repeat cheaper ones in tests/repeats.txt")
    given = made.parse_args(arguments)
    if given.record:
        return reach.record()
    if given.summary:
        print("\n".join(summary(matrix.rows(given.results), reach.read())))
        return 0
    if given.repeats:
        return _list_repeats(given.results)
    if given.drawn:
        return _drawn(given)
    chosen = [mutant for mutant in MUTANTS if re.search(given.only, mutant.name) and (mutant.modes or not given.plants)]
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.file}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    with ThreadPoolExecutor(given.jobs) as pool:
        survivors = [name for name in pool.map(partial(_run, given.tests, given.fuzz), chosen) if name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are killed")
    for name in survivors:
        print(f"survivor: {name}")
    return 1 if survivors else 0


def _list_repeats(results: Path) -> int:
    """Write `tests/repeats.txt`; tests that are in it stay there, because the recorded run had none of them."""
    tests = reach.read().tests
    lone_killers = {row.killers[0] for row in matrix.rows(results) if len(row.killers) == 1}
    new = repeats.repeats(tests, own_lines(tests), lone_killers)
    repeats.LIST.write_text("".join(f"{name}\n" for name in sorted({*repeats.names(), *new})))
    print(f"{len(new)} more tests repeat cheaper ones")
    return 0


def _drawn(given: argparse.Namespace) -> int:
    """List drawn faults, or run those of which the results have no row."""
    rooms = [room for room in given.rooms.split(",") if room]
    if unknown := set(rooms) - ROOMS.keys():
        sys.exit(f"--rooms: expected some of {', '.join(ROOMS)}; got {', '.join(sorted(unknown))}")
    faults = [fault for fault in drawn(given.drawn, chosen=rooms) if re.search(given.only, fault.name)]
    if given.list:
        for fault in faults:
            print(f"{fault.name} line {fault.line}\n  - {fault.before}\n  + {fault.after}")
    else:
        faults.sort(key=lambda fault: fault.name in EQUIVALENT)  # all tests run for those, and find nothing
        effort = matrix.Effort(given.limit, "test-full" if given.full else "test", given.first)
        recorded = reach.read()
        matrix.run(faults, recorded if recorded.tests else by_imports(), given.results, given.jobs, effort)
    return 0


def _run(tests: Path, minutes: float | None, mutant: Mutant) -> str:
    """The name of the mutant if it survives, "" if it is found."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilekern-mutant-") as directory:
        tree = Path(directory)
        matrix.copy(tree, tests)
        path = tree / mutant.file
        path.write_text(mutant.planted(path.read_text()))
        command = _tests(tree, mutant) if minutes is None else _fuzzer(minutes, mutant)
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
    by = re.search(r"^(?:FAILED|ERROR|found:) (\S+)", done.stdout, re.MULTILINE)
    # A signal that ended the tests, of an abort or a bad address, is a fault that they found; the fuzzer names its own.
    killed = by is not None or (minutes is None and (done.returncode == _FAILED or done.returncode < 0))
    how = f"killed by {by[1]}" if by else "killed" if killed else f"SURVIVES (status {done.returncode})"
    print(f"{mutant.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
    return "" if killed else mutant.name


def _tests(tree: Path, mutant: Mutant) -> list[str]:
    command = ["pytest", "-x", "-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider"]
    return [*command, *(t for t in mutant.tests if (tree / t).exists())]


def _fuzzer(minutes: float, mutant: Mutant) -> list[str]:
    command = ["tilekern", "fuzz", "--minutes", str(minutes), "--seed", "1", "--stop", "--no-shrink"]
    return [*command, "--targets", mutant.modes] if mutant.modes else command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
