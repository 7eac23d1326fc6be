"""Samples of sweeps: in as many samples as parts, each case runs."""

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
    always: bool = False

    def iter_markers(self, name: str) -> Any:
        if name in ("always", "slow"):
            return iter([getattr(pytest.mark, name).mark] if getattr(self, name) else [])
        keywords = {"among": self.among} if self.among else {}
        return (pytest.mark.sweep(parts, **keywords).mark for parts in self.marks)


SWEPT = [Case(f"tests/a.py::test_swept[{n}]", (3,)) for n in range(20)]
TWICE = [Case(f"tests/a.py::test_swept_twice[{n}]", (3, 2)) for n in range(20)]
WITH_SLOW = [Case(f"tests/a.py::test_with_slow[{n}]", (4,), slow=n > 3) for n in range(20)]
PAIRS = [Case(f"tests/a.py::test_pairs[{backend}-{n}]", (2,), among=f"{n}") for n in range(9) for backend in "ab"]
FEW = [Case(f"tests/a.py::test_few[{n}]", (parts,)) for n, parts in enumerate((8, 8, 16))]
ALONE = Case("tests/a.py::test_alone", (3,))
OTHER = Case("tests/a.py::test_other")


def left_out(sample: str) -> list[Any]:
    return sweeps.left_out(cast(Any, [*SWEPT, OTHER, *TWICE, *WITH_SLOW, *PAIRS, *FEW, ALONE]), sample)


def ran(cases: list[Case], sample: int) -> list[str]:
    gone = left_out(str(sample))
    return [case.nodeid for case in cases if case not in gone]


@pytest.mark.parametrize(("cases", "parts"), [(SWEPT, 3), (TWICE, 6), (WITH_SLOW[:4], 4), (WITH_SLOW[4:], 4)])
def test_as_many_samples_as_parts_are_all_cases(cases: list[Case], parts: int) -> None:
    samples = [ran(cases, n) for n in range(7, 7 + parts)]
    assert sorted(name for sample in samples for name in sample) == sorted(case.nodeid for case in cases)
    assert max(map(len, samples)) - min(map(len, samples)) <= 1


@pytest.mark.parametrize("function", ["test_wrong_calls", "test_what_is_refused", "test_axes_that_are_refused"])
def test_wrong_calls_run_all_cases(function: str) -> None:
    cases = [Case(f"tests/a.py::{function}[{n}]", (6,)) for n in range(20)]
    assert sweeps.left_out(cast(Any, cases), "25") == []


def test_a_case_that_is_marked_always_is_in_each_sample() -> None:
    cases = [Case(f"tests/a.py::test_some[{n}]", (6,), always=n == 4) for n in range(20)]
    for sample in range(6):
        gone = sweeps.left_out(cast(Any, cases), str(sample))
        assert cases[4] not in gone and len(gone) in (15, 16)


def test_each_sample_has_a_case_of_each_function() -> None:
    """One of few cases, each in turn, of those that run most often."""
    assert all(ran([ALONE], n) == [ALONE.nodeid] for n in range(3))
    samples = [ran(FEW, n) for n in range(16)]
    assert [len(names) for names in samples].count(1) >= 12
    assert {name for names in samples for name in names} == {case.nodeid for case in FEW}
    assert all(any(case.nodeid in names for case in FEW[:2]) for names in samples if names != [FEW[2].nodeid])


def test_each_name_has_a_sample_of_its_own() -> None:
    for n in (7, 8):
        assert sorted(nodeid.rpartition("-")[2] for nodeid in ran(PAIRS, n)) == [f"{n}]" for n in range(9)]


def test_other_tests_are_in_each_sample_and_all_cases_on_demand() -> None:
    assert not any(OTHER in left_out(str(n)) for n in range(3))
    assert left_out("all") == []


def test_a_sample_depends_on_names_alone() -> None:
    for n in range(4):
        assert set(ran(SWEPT, n)) == {
            c.nodeid for c in SWEPT if c not in sweeps.left_out(cast(Any, SWEPT[::-1]), str(n))
        }


def chosen(option: str) -> str:
    class Config:
        def getoption(self, name: str) -> str:
            return option if name == "--sweep" else ""

    return sweeps.choose(cast(Any, Config()))


def test_a_number_or_all_is_chosen() -> None:
    assert chosen(sweeps.SAMPLE).isdigit() and chosen("12") == "12" and chosen("all") == "all"


def test_an_unknown_sample_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="--sweep: expected a number or 'all'; got 'monday'"):
        chosen("monday")
