"""Samples of sweeps: over as many days as parts, each case runs once."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests import sweeps


@dataclass(frozen=True)
class Case:
    """A test, as far as sweeps look at it; of no sweep without `marks`."""

    nodeid: str
    marks: tuple[int, ...] = ()
    slow: bool = False
    among: str = ""

    def iter_markers(self, name: str) -> Any:
        if name == "slow":
            return iter([pytest.mark.slow.mark] if self.slow else [])
        keywords = {"among": self.among} if self.among else {}
        return (pytest.mark.sweep(parts, **keywords).mark for parts in self.marks)


SWEPT = [Case(f"tests/a.py::test_swept[{n}]", (3,)) for n in range(20)]
TWICE = [Case(f"tests/a.py::test_swept_twice[{n}]", (3, 2)) for n in range(20)]
WITH_SLOW = [Case(f"tests/a.py::test_with_slow[{n}]", (4,), slow=n > 3) for n in range(20)]
PAIRS = [Case(f"tests/a.py::test_pairs[{backend}-{n}]", (2,), among=f"{n}") for n in range(9) for backend in "ab"]
ALONE = Case("tests/a.py::test_alone", (3,))
OTHER = Case("tests/a.py::test_other")


def left_out(sample: str) -> list[Any]:
    return sweeps.left_out(cast(Any, [*SWEPT, OTHER, *TWICE, *WITH_SLOW, *PAIRS, ALONE]), sample)


def ran(cases: list[Case], day: int) -> list[str]:
    return [case.nodeid for case in cases if case not in left_out(str(day))]


@pytest.mark.parametrize(
    ("cases", "parts"), [(SWEPT, 3), (TWICE, 6), (WITH_SLOW[:4], 4), (WITH_SLOW[4:], 4), ([ALONE], 3)]
)
def test_the_samples_of_as_many_days_as_parts_are_all_cases(cases: list[Case], parts: int) -> None:
    days = [ran(cases, day) for day in range(7, 7 + parts)]
    assert sorted(name for day in days for name in day) == sorted(case.nodeid for case in cases)
    assert max(map(len, days)) - min(map(len, days)) <= 1


def test_each_name_has_a_sample_of_its_own() -> None:
    for day in (7, 8):
        assert sorted(nodeid.rpartition("-")[2] for nodeid in ran(PAIRS, day)) == [f"{n}]" for n in range(9)]


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
