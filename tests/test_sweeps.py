"""Samples of sweeps: over as many days as parts, each case runs once."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests import sweeps


@dataclass(frozen=True)
class Case:
    """A test, as far as sweeps look at it; of no sweep if `parts` is 0."""

    nodeid: str
    parts: int

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.sweep(self.parts).mark if self.parts and name == "sweep" else None


SWEPT = [Case(f"tests/a.py::test_swept[{n}]", 3) for n in range(20)]
OTHER = Case("tests/a.py::test_other", 0)


def left_out(sample: str) -> list[Any]:
    return sweeps.left_out(cast(Any, [*SWEPT, OTHER]), sample)


def test_the_samples_of_as_many_days_as_parts_are_all_cases() -> None:
    ran = [case for day in (7, 8, 9) for case in SWEPT if case not in left_out(str(day))]
    assert sorted(case.nodeid for case in ran) == sorted(case.nodeid for case in SWEPT)
    assert all(0 < len(left_out(str(day))) < len(SWEPT) for day in (7, 8, 9))


def test_other_tests_run_each_day_and_all_cases_on_demand() -> None:
    assert not any(OTHER in left_out(str(day)) for day in range(3))
    assert left_out("all") == []


def chosen(option: str) -> str:
    class Config:
        def getoption(self, name: str) -> str:
            return option if name == "--sweep" else ""

    return sweeps.choose(cast(Any, Config()))


def test_the_date_chooses_the_sample_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEKERN_SWEEP", raising=False)
    first = chosen("date")
    assert first.isdigit()
    monkeypatch.setenv("TILEKERN_SWEEP", "5")
    assert chosen("date") == "5" and chosen("12") == "12" and chosen("all") == "all"


def test_an_unknown_sample_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="--sweep: expected a number, 'date' or 'all'; got 'monday'"):
        chosen("monday")
