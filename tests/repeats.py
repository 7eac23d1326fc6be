"""Tests that repeat cheaper ones: they are left to `make test-full`.

`repeats.txt` has their names. `python -m tests.mutants --repeats` writes it from a recorded run. A test is in it if all
of this holds:

- it takes more than `LEAST` seconds of the processor
- it runs no line of the package that no cheaper test runs
- a cheaper case of the same test function stays
- it is in no file of `TABLES`
- no fault of the matrix is killed by it alone

Lines alone would not do: a test function has a claim of its own, so one case of each function stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.reach import Recorded

LEAST = 0.3
"""Seconds of the processor up to which a test may repeat another one."""

TABLES = (
    "tests/clients/",
    "tests/docs/",
    "tests/test_docs.py",
    "tests/test_numpy_numbers.py",
    "tests/test_wrong_calls.py",
    "tests/kernels/test_exported_sizes.py",
    "tests/kernels/test_symbolic_dims.py",
)
"""Files and folders of tests whose cases are claims of their own: of a page, a client, or a public function."""

LIST = Path(__file__).with_name("repeats.txt")


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of the list as slow; after `tests.sweeps`, whose samples depend on this mark."""
    for item in items:
        if item.nodeid in names():
            item.add_marker(pytest.mark.slow)


@cache
def names(path: Path = LIST) -> frozenset[str]:
    """The names in the list."""
    return frozenset(path.read_text().splitlines())


def repeats(tests: Sequence[Recorded], own: Mapping[str, int], lone_killers: Collection[str]) -> list[str]:
    """The sorted names of the tests that repeat cheaper ones.

    Args:
      tests: of a recorded run.
      own: for each test the number of lines that no cheaper test runs.
      lone_killers: names of tests that alone kill a fault.
    """
    functions = defaultdict[str, list[Recorded]](list)
    for test in sorted(tests, key=lambda test: test.seconds):
        functions[test.name.partition("[")[0]].append(test)
    return sorted(
        test.name
        for _, *dearer in functions.values()
        for test in dearer
        if test.seconds > LEAST and not own[test.name] and test.name not in lone_killers
        if not test.name.startswith(TABLES)
    )
