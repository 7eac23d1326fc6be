"""The tests that reach a line: recorded by a plugin of pytest, and read from the files that it writes.

Each process of a run writes one file into `FOLDER`, a line of JSON a test: its name, its seconds of the processor, the
lines of the package that it ran, whether it started a process of Python, and whether it passed. Code that tests run in
other processes is not seen. A run that was stopped goes on where it stopped. Where the package has changed since, its
lines are those that were the same; delete `FOLDER` to record anew.

The lines come from `sys.monitoring`: the first time that a test comes to a line costs a call, each further time none.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "reach"

PACKAGE = ("tilekern", "kernels")
"""The folders whose code is watched; `tilekern/kernels` is a link to the second one."""

_TOOL = sys.monitoring.COVERAGE_ID


@dataclass(frozen=True)
class Recorded:
    """One test of the recorded run.

    Attributes:
      name: pytest's, such as `tests/test_cache.py::test_hit`.
      seconds: of the processor, of all threads and of the processes that it started and that ended.
      lines: for each file, bit n is set where the test ran line n.
      starts: True if it started a process of Python.
      passed: False if it failed without any fault.
      texts: of the files whose lines it ran, as they were then.
    """

    name: str
    seconds: float
    lines: dict[str, int] = field(default_factory=dict[str, int])
    starts: bool = False
    passed: bool = True
    texts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.name.partition("::")[0]


@dataclass
class Reach:
    """The tests of a recorded run, and the texts of the package now; files of tests if none was `recorded`."""

    tests: list[Recorded]
    texts: dict[str, str]
    recorded: bool = True

    def of_lines(self, file: str, lines: Iterable[int]) -> list[Recorded]:
        """The tests that ran one of the lines of a file, whose text was another one then perhaps."""
        found: list[Recorded] = []
        for test in self.tests:
            was = _was(test.texts.get(file, ""), self.texts[file])
            if any(test.lines.get(file, 0) >> was[line] & 1 for line in lines if line in was):
                found.append(test)
        return found

    def of_files(self, files: Collection[str]) -> list[Recorded]:
        """The tests that ran a line of one of the files."""
        return [test for test in self.tests if not test.lines.keys().isdisjoint(files)]


@cache
def _was(before: str, after: str) -> dict[int, int]:
    """For each line of a text that an earlier text has, too, its number there. Lines count from 1."""
    if before == after:
        return {n: n for n in range(1, after.count("\n") + 2)}
    same = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_matching_blocks()
    return {block.b + n + 1: block.a + n + 1 for block in same for n in range(block.size)}


def read(folder: Path = FOLDER) -> Reach:
    """The recorded run: of a test that several processes ran, the last one."""
    tests: dict[str, Recorded] = {}
    masks: dict[str, int] = {}
    for path in sorted(folder.glob("*.gz")):
        texts: dict[str, str] = {}
        for line in _lines(path):
            row = json.loads(line)
            if "texts" in row:
                texts = row["texts"]
                continue
            lines = {sys.intern(name): masks.setdefault(m, int(m, 16)) for name, m in row["lines"].items()}
            tests[row["test"]] = Recorded(row["test"], row["seconds"], lines, row["starts"], row["passed"], texts)
    return Reach(list(tests.values()), files_of_package())


def record() -> int:
    """Run the tests of `make test` in one process, and record those that are not recorded yet; the status of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTEST_PLUGINS": "tests.mutants.reach",
    }  # those that tests start record themselves, too
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file whose process may have been killed."""
    try:
        with gzip.open(path, "rt") as file:
            yield from (line for line in file if line.endswith("\n"))
    except EOFError:
        return


def files_of_package() -> dict[str, str]:
    """The text of each Python file of the package, by its path from the root."""
    paths = (path for folder in PACKAGE for path in sorted((ROOT / folder).rglob("*.py")))
    real = {path.resolve().relative_to(ROOT.resolve()).as_posix(): path for path in paths}
    return {name: path.read_text() for name, path in sorted(real.items())}


def importers(file: str, texts: dict[str, str]) -> set[str]:
    """The files that import a module, or a name from it."""
    parts = re.sub(r"^kernels/", "tilekern/kernels/", file).removesuffix(".py").removesuffix("/__init__").split("/")
    module, package, name = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    found = re.compile(rf"import {re.escape(module)}\b|from {re.escape(module)} import|{_from(package, name)}")
    return {path for path, text in texts.items() if found.search(text)}


def _from(package: str, name: str) -> str:
    """The pattern of an import of a name from a package, whose names may stand in parentheses."""
    return rf"from {re.escape(package)} import (?:\([^)]*|[^(\n]*)\b{name}\b"


class Recorder:
    """The plugin. It watches the code of modules that are imported after it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._known = {test.name for test in read(folder).tests}
        self._file = gzip.open(folder / f"{os.getpid()}.gz", "at", compresslevel=6)  # noqa: SIM115 -- closed at the end
        self._write({"texts": files_of_package()})
        self._lines: set[tuple[str, int]] = set()
        self._names: dict[str, str] = {}
        self._starts, self._passed = False, True
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "reach")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._line)
        load = SourceFileLoader.get_code

        def watched(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            code = load(loader, fullname)
            if code is not None and fullname.partition(".")[0] in PACKAGE:
                self._watch(code)
            return code

        SourceFileLoader.get_code = watched  # pyright: ignore[reportAttributeAccessIssue] -- its parameter is `self`
        sys.addaudithook(self._audit)

    def _watch(self, code: CodeType) -> None:
        """Ask for the lines of a code object, and of those in it."""
        if code.co_filename not in self._names:
            path = Path(code.co_filename).resolve()
            if not path.is_relative_to(ROOT.resolve()):
                return
            self._names[code.co_filename] = path.relative_to(ROOT.resolve()).as_posix()
        sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._watch(inner)

    def _line(self, code: CodeType, line: int) -> Any:
        self._lines.add((code.co_filename, line))
        return sys.monitoring.DISABLE

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        self._starts = self._starts or (event == "subprocess.Popen" and "python" in str(arguments[0] or arguments[1]))

    def _write(self, row: dict[str, Any]) -> None:
        """Write a row at once: the process may be killed."""
        print(json.dumps(row), file=self._file)
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that an earlier run recorded."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._known])
        items[:] = [item for item in items if item.nodeid not in self._known]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a test, and write what it reached."""
        self._lines.clear()
        self._starts, self._passed, began = False, True, sum(os.times()[:4])
        sys.monitoring.restart_events()
        result = yield
        lines: dict[str, int] = {}
        for name, line in self._lines:
            lines[name] = lines.get(name, 0) | 1 << line
        row = {
            "test": item.nodeid,
            "seconds": round(sum(os.times()[:4]) - began, 3),
            "starts": self._starts,
            "passed": self._passed,
            "lines": {self._names[name]: f"{mask:x}" for name, mask in sorted(lines.items())},
        }
        if item.path.is_relative_to(ROOT):
            self._write(row)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure of set-up, call or tear-down."""
        self._passed = self._passed and not report.failed

    def pytest_sessionfinish(self) -> None:
        """All tests are recorded."""
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    """Record, where this module is a plugin: `PYTEST_PLUGINS=tests.mutants.reach`."""
    config.pluginmanager.register(Recorder())
