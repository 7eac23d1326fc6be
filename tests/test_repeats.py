"""`tests.repeats`: which tests are left to `make test-full` because cheaper ones run the same lines."""

from pathlib import Path
from typing import Any, cast

import pytest

from tests import repeats
from tests.mutants.reach import Recorded

ROOT = Path(__file__).parents[1]


def listed(
    *tests: tuple[str, float], own: dict[str, int] | None = None, lone_killers: frozenset[str] = frozenset()
) -> list[str]:
    recorded = [Recorded(name, seconds) for name, seconds in tests]
    return repeats.repeats(recorded, dict.fromkeys((name for name, _ in tests), 0) | (own or {}), lone_killers)


def test_the_cheapest_case_of_a_function_stays() -> None:
    assert listed(("a::f[1]", 9.0), ("a::f[2]", 1.0), ("a::f[3]", 5.0), ("a::g", 1.0)) == ["a::f[1]", "a::f[3]"]


def test_the_only_case_of_a_function_goes_if_it_is_dear_and_makes_no_promise() -> None:
    assert listed(("a::f", 2.1), ("a::g", 1.9), ("tests/meshes/a::f", 9.0)) == ["a::f"]


def test_a_dear_case_with_lines_of_its_own_stays() -> None:
    assert listed(("a::f", 2.1), own={"a::f": 1}) == []


def test_cheap_tests_stay() -> None:
    assert listed(("a::f[1]", 0.1), ("a::f[2]", 0.3), ("a::f[3]", 0.4)) == ["a::f[3]"]


def test_a_test_with_lines_of_its_own_stays() -> None:
    assert listed(("a::f[1]", 1.0), ("a::f[2]", 2.0), ("a::f[3]", 3.0), own={"a::f[3]": 1}) == ["a::f[2]"]


def test_a_test_that_alone_kills_a_fault_stays() -> None:
    lone_killers = frozenset({"a::f[2]", "a::g"})
    tests = ("a::f[1]", 1.0), ("a::f[2]", 2.0), ("a::f[3]", 3.0), ("a::g", 9.0)
    assert listed(*tests, lone_killers=lone_killers) == ["a::f[3]"]


def test_cases_that_are_claims_of_their_own_stay() -> None:
    assert listed(("tests/test_docs.py::f[1]", 1.0), ("tests/test_docs.py::f[2]", 2.0)) == []


def test_tests_of_the_list_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid, self.marks = nodeid, list[pytest.MarkDecorator]()

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark)

    items = [Item("a::f[1]"), Item("a::f[2]")]
    monkeypatch.setattr(repeats, "names", lambda: {"a::f[2]"})
    repeats.mark(cast("Any", items))
    assert [item.marks for item in items] == [[], [pytest.mark.slow]]


def test_the_list_is_sorted_and_its_tests_exist() -> None:
    names = repeats.LIST.read_text().splitlines()
    assert names == sorted(set(names))
    for name in names:
        file, _, test = name.partition("::")
        function = test.rpartition("::")[2].partition("[")[0]
        assert f"def {function}(" in (ROOT / file).read_text(), f"{name}: take it out of the list"
