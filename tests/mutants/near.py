"""The files of tests that are near to a fault, by names and imports: what is known without a recorded run."""

from __future__ import annotations

from pathlib import PurePosixPath

from tests import durations
from tests.mutants.edits import Edit
from tests.mutants.reach import ROOT, Reach, Recorded, files_of_package, importers

LEFT_OUT = ("tests/test_mutants.py", "tests/test_durations.py")
"""Tests that look at the text of the package, or at mutants."""

# Files of tests that run most of the package: behind those that are near, if no run was recorded.
_BROAD = ("tests/lower/test_random_programs.py", "tests/lower/test_gradients.py", "tests/lower/test_regressions.py")


def by_imports() -> Reach:
    """All files of tests, each in the place of its tests: it reaches the modules that it imports.

    This needs no recorded run, and knows less: a fault may be reached by tests that do not import its module.
    """
    texts, seconds = files_of_package(), durations.recorded()
    paths = {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    lines = {name: dict[str, int]() for name in paths}
    for file in texts:
        for name in importers(file, paths):
            lines[name][file] = -1
    return Reach(
        [Recorded(name, seconds.get(name, 1.0), lines[name], texts=texts) for name in paths], texts, recorded=False
    )


def by_nearness(fault: Edit, reach: Reach) -> list[Recorded]:
    """All files of tests, if no run was recorded: first those that are named after the module, or import it."""
    near = {test.name: 4 * (fault.file in test.lines) + nearness(test.file, fault.file) for test in reach.tests}
    return sorted(
        (test for test in reach.tests if test.file not in LEFT_OUT),
        key=lambda test: (near[test.name] < 4, test.file not in _BROAD, -near[test.name], test.seconds, test.file),
    )


def nearness(test: str, file: str) -> int:
    """The folders that a file of tests shares with a file of the package, and one more for its name."""
    tests, folders = PurePosixPath(test.removeprefix("tests/")), PurePosixPath(file.removeprefix("tilekern/"))
    shared = 0
    for x, y in zip(tests.parts[:-1], folders.parts[:-1], strict=False):
        if x != y:
            break
        shared += 1
    return 2 * shared + (folders.stem in tests.stem)
