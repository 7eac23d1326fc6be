"""A plugin of pytest that runs chosen tests, and writes what becomes of each as soon as it is known.

`--chosen FILE` holds the names of tests, or of files for all of their tests, a line each. `--events FILE` gets a line
of JSON when a test starts, and when it ends. Hypothesis does not shrink failing examples: that takes minutes, and one
failure is as good as another.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings


class _Events:
    """Writes the events."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._failed = self._ran = False

    def _write(self, event: str, name: str) -> None:
        print(json.dumps({"event": event, "test": name}), file=self._file, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test starts."""
        self._failed = self._ran = False
        self._write("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Its set-up, call or tear-down ended."""
        self._failed = self._failed or report.failed
        self._ran = self._ran or (report.when == "call" and not report.skipped)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The test ended."""
        self._write("failed" if self._failed else "passed" if self._ran else "skipped", nodeid)

    def pytest_sessionfinish(self) -> None:
        """All tests ended."""
        self._write("finish", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    parser.addoption("--chosen", required=True)
    parser.addoption("--events", required=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set up Hypothesis, after `conftest.py` has."""
    parent = settings.get_profile(str(config.getoption("--hypothesis-profile") or "ci"))
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("chosen", parent=parent, phases=phases, report_multiple_bugs=False)
    settings.load_profile("chosen")
    events = Path(str(config.getoption("--events")))
    config.pluginmanager.register(_Events(events))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests, in the order of their files in the list."""
    path = Path(str(config.getoption("--chosen")))
    chosen = path.read_text().splitlines()
    files = {name.partition("::")[0]: n for n, name in reversed(list(enumerate(chosen)))}
    names = set(chosen)
    file_of = {item: item.nodeid.partition("::")[0] for item in items}
    kept = [item for item in items if item.nodeid in names or file_of[item] in names]
    items[:] = sorted(kept, key=lambda item: files[file_of[item]])
