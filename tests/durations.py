"""Durations of test files: recorded by `pytest --record-durations`, used to start the longest files first.

`durations.json` holds the seconds of each file that takes more than one, measured on two idle cores. A run on several
processes ends when the last one does, so the files that take long come first, and the short ones fill the gaps.
`tests/test_durations.py` holds files and the whole below their budgets.
"""

from __future__ import annotations

import json
from collections import defaultdict
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
    """A plugin that writes the durations of a run."""

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and tear-down."""
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file; files that did not run keep what was recorded."""
        kept = {name: seconds for name, seconds in recorded().items() if name not in self._seconds}
        found = kept | {name: round(s, 1) for name, s in self._seconds.items() if s > _SHORT}
        FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
