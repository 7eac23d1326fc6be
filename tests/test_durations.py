"""Budgets: seconds of the tests of a file, and of all, as they were recorded on two idle cores."""

from pathlib import Path

import pytest

from tests.durations import recorded

ROOT = Path(__file__).parent.parent

# Both processes together; CI's limit for two cores is 15 minutes, with checks and documentation.
_OF_ALL = 2 * 12 * 60
_OF_A_FILE = 75


def test_all_tests_together_keep_to_their_budget() -> None:
    assert sum(recorded().values()) <= _OF_ALL


@pytest.mark.parametrize("file", sorted(recorded()))
def test_a_file_keeps_to_its_budget(file: str) -> None:
    assert (ROOT / file).exists(), "run pytest --record-durations again"
    assert recorded()[file] <= _OF_A_FILE
