"""A plugin of pytest: a fixture that checks kernels, and options of the command line.

In `conftest.py`: `pytest_plugins = ["tilekern.testing.plugin"]`. Then

    @pytest.mark.tilekern(max_examples=100, targets=["cpu:llvm", "cuda:sm_90"])
    def test_my_kernel(tilekern_check):
        tilekern_check(my_kernel, my_reference)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilekern.testing.check import check
from tilekern.testing.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("tilekern")
    group.addoption("--tilekern-examples", type=int, metavar="N", help="random calls of each kernel that is checked")
    group.addoption("--tilekern-targets", metavar="NAMES", help='targets to check on, such as "cpu:llvm,cuda:sm_90"')
    group.addoption("--tilekern-seed", type=int, metavar="N", help="another seed gives other calls")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "tilekern(**options): options of `tilekern.testing.check` for tilekern_check")


@pytest.fixture
def tilekern_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`tilekern.testing.check` with the options of the command line, else those of the marker."""
    marker = request.node.get_closest_marker("tilekern")
    options: dict[str, Any] = dict(marker.kwargs) if marker else {}
    option_names = {"max_examples": "examples", "targets": "targets", "seed": "seed"}
    for name, option in option_names.items():
        value = request.config.getoption(f"--tilekern-{option}")
        if value is not None:
            options[name] = value.split(",") if name == "targets" else value

    def run(*arguments: Any, **keywords: Any) -> Report:
        report = check(*arguments, **{**options, "progress": False, **keywords})
        print(report)  # noqa: T201 -- pytest shows it for tests that fail, and with -s
        return report

    return run
