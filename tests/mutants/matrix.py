"""The matrix of faults and tests: for each drawn fault, the tests that fail where it is planted.

A fault is planted in a copy of the tree. The tests that reach its lines run there in batches, each in one process:
first cheap tests of files near to the fault, then cheap tests of others, then tests that take over `DEAR` seconds. The
batch of the first failure runs to its end, so that the matrix knows several killers of most faults. Where tests that
are dear are the only killers, all of them run: such a fault says which of them may not go.

A test that ends the process, or hangs, kills. Kills are confirmed: the first killers pass without the fault. If none of
them does, the tree is broken, and the fault stays open.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.mutants.edits import Edit
from tests.mutants.near import LEFT_OUT, by_nearness, nearness
from tests.mutants.reach import ROOT, Reach, Recorded, importers

DEAR = 2.0
"""Seconds of the processor over which a test must kill something alone."""

_BATCHES = (6.0, 30.0, 120.0, 240.0)
"""Seconds of the first batches; the others are as long as the last one."""

_KILLS = 25
"""Failures after which a batch ends."""

_CONFIRMED = 3
"""The number of killers that are run again without the fault."""

_WHOLE = 6.0
"""The seconds of all tests of a file, as a multiple of those of the ordinary run."""

_MEMORY = 12 << 30
"""Bytes that the processes of a batch may have each: a fault may ask for all of the machine."""

# Code that runs in a process which one test starts and many use: the code that talks to it.
_SERVED = {"tilekern/lower/triton/interpreter/": "tilekern/lower/triton/interpret.py"}


@dataclass
class Row:
    """One fault of the matrix, as a line of JSON.

    Attributes:
      fault: its name.
      line: the number of its line.
      before: the text that it replaces.
      after: the faulty text.
      verdict: "killed", "survives", or "open" if the limit left tests out.
      suite: "test" for the tests of `make test`, "test-full" if these find nothing, and those of `make test-full` ran.
      killers: the tests that fail.
      passed: how many tests that reach the fault passed with it.
      reached: how many tests reach it.
      seconds: of the clock.
    """

    fault: str
    line: int
    before: str
    after: str
    verdict: str = "open"
    suite: str = "test"
    killers: list[str] = field(default_factory=list[str])
    passed: int = 0
    reached: int = 0
    seconds: float = 0.0


def rows(results: Path) -> list[Row]:
    """The rows of a file; of a fault that was run again, the last one."""
    lines = results.read_text().splitlines() if results.exists() else []
    return list({row["fault"]: Row(**row) for row in map(json.loads, lines)}.values())


@dataclass(frozen=True)
class Effort:
    """The tests that run for a fault.

    Attributes:
      limit: seconds of tests, behind which the fault stays open.
      suite: "test", or "test-full" for faults that the tests of `make test` do not find.
      first: the first failure ends the tests of a fault.
    """

    limit: float
    suite: str = "test"
    first: bool = False


def run(faults: Sequence[Edit], reach: Reach, results: Path, jobs: int, effort: Effort) -> None:
    """Append a row for each fault that has none yet, or whose row is open; of "test-full", for those that survive."""
    suite = effort.suite
    known = {row.fault: row for row in rows(results)}
    waits = ("survives",) if suite == "test-full" else ("", "open")
    waiting = [f for f in faults if (known[f.name].verdict if f.name in known else "") in waits]
    with tempfile.TemporaryDirectory(prefix="tilekern-matrix-") as directory, ThreadPoolExecutor(jobs) as pool:
        trees = [Tree(Path(directory) / str(n)) for n in range(jobs)]
        for tree in trees:
            copy(tree.path)

        def one(fault: Edit) -> None:
            tree = trees.pop()
            row = _row(fault, reach, tree, effort)
            trees.append(tree)
            with results.open("a") as file:
                print(json.dumps(asdict(row)), file=file)
            by = f" by {row.killers[0]}" if row.killers else ""
            print(f"{row.fault}: {row.verdict}{by}, {row.passed} passed, {row.seconds:.0f} s", flush=True)

        list(pool.map(one, waiting))


def _row(fault: Edit, reach: Reach, tree: Tree, effort: Effort) -> Row:
    """Run the tests of a fault."""
    row, began, ran = Row(fault.name, fault.line, fault.before, fault.after, suite=effort.suite), time.monotonic(), 0.0
    tests = reaching(fault, reach) if reach.recorded else by_nearness(fault, reach)
    if effort.suite == "test-full":
        tests = whole_files(tests)
    seconds = {test.name: test.seconds for test in tests}
    row.reached = len(tests)
    for batch in batches(tests):
        if ran > effort.limit:
            break
        passed, killers = _killers(fault, batch, tree, effort)
        row.passed += passed
        row.killers += killers
        ran += sum(test.seconds for test in batch)
        if killers and (effort.first or any(seconds.get(name, 0.0) <= DEAR for name in killers)):
            break
    else:
        row.verdict = "survives"
    if row.killers:
        row.verdict = "killed"
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _killers(fault: Edit, batch: Sequence[Recorded], tree: Tree, effort: Effort) -> tuple[int, list[str]]:
    """How many tests of a batch pass with the fault, and the tests that kill it.

    A test that also fails without the fault ends no batch: the tests behind it run then.
    """
    passing, left = 0, [test for test in batch if test.name not in tree.unsound]
    while left:
        tree.plant(fault)
        try:
            passed, failed = tree.outcomes(left, effort.suite, effort.first)
        finally:
            tree.restore(fault)
        passing += len(passed)
        killers = confirmed(failed, left, tree, effort.suite) if failed else []
        behind = [test for test in left if test.name not in {*passed, *failed}]
        if killers or not failed or not effort.first or len(behind) == len(left):
            return passing, killers
        tree.unsound.update(failed)
        left = behind
    return passing, []


def confirmed(killers: list[str], batch: Sequence[Recorded], tree: Tree, suite: str) -> list[str]:
    """The killers without those that fail in the tree without a fault, too; none if the first ones all do."""
    seconds = {test.name: test.seconds for test in batch}
    # A test that passed beside others may fail alone, so that none is believed because it passed before.
    doubted = killers[:_CONFIRMED]
    again = [Recorded(name, seconds.get(name, 20.0)) for name in doubted if "::" in name]
    passed, failed = tree.outcomes(again or batch[:1], suite)
    if not again:  # a process ended outside of its tests: without the fault, a file of tests runs to its end
        return killers if passed and not failed else []
    return [name for name in killers if name not in failed] if set(doubted) & set(passed) else []


def reaching(fault: Edit, reach: Reach) -> list[Recorded]:
    """The tests that reach a fault, those first that kill fast: cheap ones, of near files.

    The file of tests that has the module's name counts as a whole: a test whose result an earlier test left in a cache
    of the process reached no line in the recorded run.
    """
    found: dict[str, Recorded] = {}
    served = next((client for folder, client in _SERVED.items() if fault.file.startswith(folder)), "")
    if served:
        found = {test.name: test for test in reach.of_files({served})}
    elif fault.scope:
        found = {test.name: test for test in reach.of_lines(fault.file, fault.lines)}
    # Code that runs when a module is imported, or in processes alone, is reached by those that use the module.
    for files in ({fault.file}, importers(fault.file, reach.texts)):
        found = found or {test.name: test for test in reach.of_files(files)}
    module = Path("tests", fault.file.removeprefix("tilekern/"))
    own_file = module.with_name(f"test_{module.name}").as_posix()
    named = {test.name: test for test in reach.tests if test.file == own_file}
    found |= named | {test.name: test for test in reach.tests if test.starts}
    tests = [test for test in found.values() if test.passed and test.file not in LEFT_OUT]
    totals = defaultdict[str, float](float)
    for test in tests:
        totals[test.file] += test.seconds
    reaches = {test.name for test in tests if fault.file in test.lines}
    return sorted(
        tests,
        key=lambda test: (test.name not in reaches and test.starts, _dear(test), test.name not in named,
                          -nearness(test.file, fault.file), totals[test.file], test.file),
    )  # fmt: skip


def whole_files(tests: Sequence[Recorded]) -> list[Recorded]:
    """The files of tests, each in the place of all of its tests, the slow ones included."""
    seconds = defaultdict[str, float](float)
    for test in tests:
        seconds[test.file] += test.seconds
    return [Recorded(file, _WHOLE * total) for file, total in seconds.items()]


def _dear(test: Recorded) -> bool:
    return test.seconds > DEAR


def batches(tests: Sequence[Recorded]) -> Iterator[list[Recorded]]:
    """Cut tests into batches, of which the first ones are short."""
    sizes = iter(_BATCHES)
    size, batch, seconds = next(sizes), list[Recorded](), 0.0
    for test in tests:
        # A file costs a moment to collect.
        cost = test.seconds + 0.1 * (not batch or batch[-1].file != test.file)
        if batch and seconds + cost > size:
            yield batch
            size, batch, seconds = next(sizes, _BATCHES[-1]), [], 0.0
        batch.append(test)
        seconds += cost
    if batch:
        yield batch


@dataclass(frozen=True)
class Tree:
    """A copy of the tree in which faults are planted, one at a time.

    Attributes:
      path: of its root.
      unsound: the tests that fail in it without a fault.
    """

    path: Path
    unsound: set[str] = field(default_factory=set[str])

    def plant(self, fault: Edit) -> None:
        """Plant a fault. Its file is newer than all others, so its compiled code is not that of the original."""
        path = self.path / fault.file
        path.write_text(fault.planted(path.read_text()))

    def restore(self, fault: Edit) -> None:
        """Take the fault out, with what was compiled while it was in."""
        shutil.copy2(ROOT / fault.file, self.path / fault.file)
        shutil.rmtree(self.path / "build", ignore_errors=True)

    def outcomes(
        self, tests: Sequence[Recorded], suite: str = "test", first: bool = False
    ) -> tuple[list[str], list[str]]:
        """The names of the tests that pass, and of those that fail, hang, or end the process: all, or the `first`."""
        chosen, events = self.path / "chosen.txt", self.path / "events.json"
        chosen.write_text("".join(f"{test.name}\n" for test in tests))
        events.write_text("")
        files = list(dict.fromkeys(test.file for test in tests))
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "--tb=no", f"--maxfail={1 if first else _KILLS}"]
        command += ["--hypothesis-profile=full", "--sweep", "all"] if suite == "test-full" else ["-m", "not slow"]
        command += ["-p", "no:cacheprovider", "-p", "tests.mutants.chosen", "--chosen", str(chosen)]
        command += ["--events", str(events), *files]
        environment = {**os.environ, "PYTHONPATH": str(self.path)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.Popen(
            command,
            cwd=self.path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY)),
        )
        hangs = _wait(process, events, {test.name: test.seconds for test in tests})
        return _read(events, process.returncode, hangs)


def _wait(process: subprocess.Popen[bytes], events: Path, seconds: dict[str, float]) -> bool:
    """Wait for the end, or for a test that takes far longer than it did: True if one hangs."""
    while True:
        try:
            process.wait(2)
            return False
        except subprocess.TimeoutExpired:
            pass
        last = events.read_text().rstrip("\n").rpartition("\n")[2]
        test = json.loads(last)["test"] if last.endswith("}") else ""
        # Before the first test, pytest collects.
        usual = seconds.get(test, seconds.get(test.partition("::")[0], 20.0))
        waiting = max(
            1.0, os.getloadavg()[0] / (os.cpu_count() or 1)
        )  # processes on a busy machine take so much longer
        if time.time() - events.stat().st_mtime > max(120.0, 15 * usual) * waiting:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True


def _read(events: Path, status: int | None, hangs: bool) -> tuple[list[str], list[str]]:
    """The tests that passed, and those that failed; "collection" and "exit" are no tests."""
    said = [json.loads(line) for line in events.read_text().splitlines()]
    passed, failed = ([each["test"] for each in said if each["event"] == event] for event in ("passed", "failed"))
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:  # they have other names now
        return [], []
    if all(each["event"] == "finish" for each in said):
        failed.append("collection")
    elif said[-1]["event"] == "start":
        failed.append(said[-1]["test"])
    elif hangs:
        failed.append("exit")
    return passed, failed


def copy(tree: Path, tests: Path = ROOT) -> None:
    """Copy the files that git knows, with the tests of another tree."""
    for root, wanted in ((ROOT, False), (tests, True)):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if name.startswith("tests/") is wanted and (root / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
