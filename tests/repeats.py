"""Tests that repeat cheaper ones: they are left to `make test-full`.

`repeats.txt` has their names. `python -m tests.mutants --repeats` writes it from a recorded run. A test is in it if all
of this holds:

- it takes more than `LEAST` seconds of the processor
- it runs no line of the package that no cheaper test runs
- a cheaper case of the same test function stays, or it takes more than `DEAR` seconds and is in no file of `PROMISES`
- it is in no file of `TABLES`
- no fault of the matrix is killed by it alone

Lines alone would not do: a test function has a claim of its own, so one case of each function stays unless it is dear.
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

DEAR = 2.0
"""Seconds of the processor over which the only case of a test function must kill a fault alone."""

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

PROMISES = (
    "tests/autodiff/test_random_programs.py",
    "tests/ir/",
    "tests/kernels/caches/test_guard_pages.py",
    "tests/kernels/sample/test_hidden.py::test_scores_that_nearly_tie",
    "tests/lang/",
    "tests/lower/llvm/compile/test_instruction_selection.py",
    "tests/lower/llvm/test_call.py",
    "tests/lower/llvm/test_determinism.py",
    "tests/lower/llvm/test_memory_bounds.py",
    "tests/lower/mosaic/test_races.py",
    "tests/lower/test_random_programs.py",
    "tests/lower/triton/legalize/",
    "tests/lower/triton/recording/",
    "tests/meshes/",
    "tests/passes/",
    "tests/test_demo.py",
    "tests/test_generate.py",
    "tests/test_llama.py",
    "tests/test_processes.py",
    "tests/test_robustness.py",
    "tests/test_threads.py",
    "tests/testing/",
    "tilekern/",
)
"""Tests of random programs, and of whole programs, processes, meshes and memory, of which lines say little."""

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
        for cases in functions.values()
        for test in cases
        if test is not cases[0] or (test.seconds > DEAR and not test.name.startswith(PROMISES))
        if test.seconds > LEAST and not own[test.name] and test.name not in lone_killers
        if not test.name.startswith(TABLES)
    )
