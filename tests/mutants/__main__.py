"""The command line: see `tests.mutants`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]

# The status of pytest where a test failed, and of the fuzzer where it found something.
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
    given = made.parse_args(arguments)
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


def _run(tests: Path, minutes: float | None, mutant: Mutant) -> str:
    """The name of the mutant if it survives, "" if it is found."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilekern-mutant-") as directory:
        tree = Path(directory)
        _copy(tree, tests)
        path = tree / mutant.file
        path.write_text(mutant.planted(path.read_text()))
        command = _tests(tree, mutant) if minutes is None else _fuzzer(minutes, mutant)
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
    by = re.search(r"^(?:FAILED|ERROR|found:) (\S+)", done.stdout, re.MULTILINE)
    # A signal that ended the tests, of an abort or a bad address, is a fault that they found.
    killed = done.returncode == _FAILED or done.returncode < 0 or by is not None
    how = f"killed by {by[1]}" if by else "killed" if killed else f"SURVIVES (status {done.returncode})"
    print(f"{mutant.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
    return "" if killed else mutant.name


def _tests(tree: Path, mutant: Mutant) -> list[str]:
    command = ["pytest", "-x", "-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider"]
    return [*command, *(t for t in mutant.tests if (tree / t).exists())]


def _fuzzer(minutes: float, mutant: Mutant) -> list[str]:
    command = ["tilekern", "fuzz", "--minutes", str(minutes), "--seed", "1", "--stop", "--no-shrink"]
    return [*command, "--targets", mutant.modes] if mutant.modes else command


def _copy(tree: Path, tests: Path) -> None:
    """Copy the files that git tracks, with the tests of another tree."""
    for root, wanted in ((ROOT, False), (tests, True)):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if name.startswith("tests/") is wanted and (root / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
