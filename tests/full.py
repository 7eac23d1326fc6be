"""All tests, part by part: a run goes on where the one before stopped, and says what is left.

    python -m tests.full                 run the parts that have not passed at this commit
    python -m tests.full --list          print each part, and how it ended last
    python -m tests.full --only REGEX    only parts in whose name it occurs
    python -m tests.full --earlier       a part that passed at an earlier commit counts, too

A part is the tests of a folder, without those of its subfolders; a file that takes long is a part alone, or each of its
functions is. All cases of sweeps and all slow tests are run, with 500 examples of each property, and random programs of
seeds that no earlier commit had. What ended how is kept in `build/test-full.json`, one entry a part, written when the
part has ended: a part that is interrupted is run again as a whole. The output of each part is in `build/test-full/`, as
far as it has come.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import levels

ROOT = Path(__file__).parents[1]
STATE = ROOT / "build" / "test-full.json"

ALONE = (
    "tests/lower/triton/test_library.py",
    "tests/lower/triton/test_library_elsewhere.py",
    "tests/lower/triton/recording/test_library.py",
    "tests/lower/mosaic/test_library.py",
    "tests/meshes/test_random_divided.py",
    "tests/kernels/flash_attention/test_kernel.py",
)
"""Files that are parts of their own, so that each part takes an hour at most."""

BY_FUNCTION = ("tests/lower/test_random_programs.py",)
"""Files of which each test function is a part."""


@dataclass(frozen=True)
class Part:
    """Tests that are run in one go.

    Attributes:
      name: a folder or a file of tests, or what a command of the project tests.
      command: the arguments of `python`.
    """

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
      commit: the revision that was checked out, with "+" if files were changed since.
      passed: True if no test failed.
      seconds: by the clock.
      summary: the line with the number of tests, or the last line of the output; and a line for each failure, and for
        what was skipped as a whole.
    """

    commit: str
    passed: bool
    seconds: float
    summary: tuple[str, ...]


def parts(jobs: int = 2, seeds: int = 0) -> Iterator[Part]:
    """Every part, in the order in which they run; together they are all tests of the project.

    Args:
      jobs: the number of test processes.
      seeds: the number of `--seeds`, which chooses the random programs.
    """
    options = f"-q -n {jobs} --dist worksteal --hypothesis-profile=full --sweep all --seeds {seeds}"
    pytest = ("-m", "pytest", *options.split())
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    for folder in sorted(folders):
        files = sorted(path.relative_to(ROOT).as_posix() for path in folder.glob("test_*.py"))
        shared = [file for file in files if file not in ALONE + BY_FUNCTION]
        if shared:
            yield Part(folder.relative_to(ROOT).as_posix(), (*pytest, *shared))
        alone = [file for file in files if file in ALONE]
        alone += [test for file in files if file in BY_FUNCTION for test in _functions(file)]
        yield from (Part(name, (*pytest, name)) for name in alone)
    yield Part("examples of docstrings", (*pytest, "tilekern"))
    for level in levels.NAMES:
        yield Part(f"code for {level}", ("-m", "tests.levels", "--all", "--only", level, "--jobs", str(jobs)))
    yield Part("mutants", ("-m", "tests.mutants", "--jobs", str(jobs)))


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status: 1 if a part failed or is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.full", description="run all tests, part by part")
    parser.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    parser.add_argument("--only", default="", metavar="REGEX", help="parts in whose name it occurs")
    parser.add_argument("--earlier", action="store_true", help="count what passed at an earlier commit")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="test processes (default: 2)")
    options = parser.parse_args(arguments)
    commit = _commit()
    chosen = [part for part in parts(options.jobs, seeds_of(commit)) if re.search(options.only, part.name)]
    if not options.list:
        for part in chosen:
            if not _holds(load().get(part.name), commit, options.earlier):
                _say(f"{part.name} ...")
                save(part.name, _run(part, commit))
                _say(_line(part.name, load()[part.name]))
    outcomes = load()
    left = [part.name for part in chosen if not _holds(outcomes.get(part.name), commit, options.earlier)]
    for name in [part.name for part in chosen] if options.list else left:
        _say(_line(name, outcomes.get(name)))
    _say(f"{len(chosen) - len(left)} of {len(chosen)} parts have passed at {commit}{' or before' * options.earlier}")
    return 1 if left else 0


def seeds_of(commit: str) -> int:
    """The number of `--seeds` at a commit, a number of its own with good luck: from 0 to 9,999."""
    return int(commit.rstrip("+"), 16) % 10_000


def load() -> Mapping[str, Outcome]:
    """The outcomes of parts by name, of any commit."""
    if not STATE.exists():
        return {}
    entries = json.loads(STATE.read_text())
    return {name: Outcome(**(entry | {"summary": tuple(entry["summary"])})) for name, entry in entries.items()}


def save(name: str, outcome: Outcome) -> None:
    """Add the outcome of a part to the file, which is whole at any time."""
    entries = {key: asdict(value) for key, value in {**load(), name: outcome}.items()}
    STATE.parent.mkdir(parents=True, exist_ok=True)
    written = STATE.with_suffix(".new")
    written.write_text(json.dumps(entries, indent=1) + "\n")
    written.replace(STATE)


def _functions(file: str) -> Sequence[str]:
    """The test functions of a file, as arguments of pytest."""
    return [f"{file}::{name}" for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)]


def _holds(outcome: Outcome | None, commit: str, earlier: bool) -> bool:
    """True if a part has passed, at this commit if not `earlier`."""
    return outcome is not None and outcome.passed and (earlier or outcome.commit == commit)


def _run(part: Part, commit: str) -> Outcome:
    began = time.monotonic()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    output = STATE.with_suffix("") / f"{re.sub(r'[^\w-]+', '.', part.name)}.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        command = [sys.executable, *part.command]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed)|are killed$", line)]
    notes = [line for line in lines if line.startswith(("FAILED", "ERROR", "survivor")) or ": skipped, " in line]
    last = counts[-1:] or lines[-1:] or [f"no output, status {done.returncode}"]
    summary = tuple(dict.fromkeys((*last, *notes)))
    return Outcome(commit, done.returncode == 0, round(time.monotonic() - began, 1), summary)


def _line(name: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"{name}: not run"
    how = "passed" if outcome.passed else "failed"
    return "\n  ".join((f"{name}: {how} at {outcome.commit} in {outcome.seconds:.0f} s", *outcome.summary))


def _commit() -> str:
    """The revision that is checked out, with "+" if files of the repository were changed since."""
    git = ("git", "-C", str(ROOT))
    revision = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    return revision.stdout.strip() + "+" * bool(changed.stdout.strip())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
