"""Durations of test files: recorded by `pytest --record-durations`, used to start the longest files first.

`durations.json` holds the seconds of the processor, of all threads and of the processes that tests start, for each file
that takes more than one: other work on the machine does not count. A run on several processes ends when the last one
does, so the files that take long come first, and the short ones fill the gaps.
`tests/test_durations.py` holds files and the whole below their budgets.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")

# Seconds of a file below which it is not recorded.
_SHORT = 1.0


def recorded() -> dict[str, float]:
    """Seconds by file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the time of their files, the longest first; the tests of a file stay together, in order."""
    seconds = recorded()
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0.0))


class Recorder:
    """A plugin that measures in each process of a run, and writes the durations in the one that starts the others."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._seconds = defaultdict[str, float](float)
        self._begin = 0.0

    def pytest_runtest_logstart(self) -> None:
        """Begin a test."""
        self._begin = _processor()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note in the report of set-up, call or tear-down the seconds since the one before."""
        report, begin = (yield), self._begin
        self._begin = _processor()
        report.processor = self._begin - begin  # pyright: ignore[reportAttributeAccessIssue] -- reports take any
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and tear-down."""
        self._seconds[_file(report.nodeid)] += getattr(report, "processor", 0.0)

    def pytest_sessionfinish(self) -> None:
        """Write the file; files that did not run keep what was recorded."""
        if not self._writes:
            return
        kept = {name: seconds for name, seconds in recorded().items() if name not in self._seconds}
        found = kept | {name: round(s, 1) for name, s in self._seconds.items() if s > _SHORT}
        FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def _processor() -> float:
    """Seconds of all threads, and of the processes that have ended."""
    return sum(os.times()[:4])


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
