"""Sweeps: tests over many cases, of which an ordinary run takes a sample, always the same one.

    @pytest.mark.sweep(8)      one case in eight is run
    pytest --sweep 3           another sample; those of eight numbers in a row are all cases
    pytest --sweep all         all cases, as in `make test-full`; a case that is named alone may need it, too

The sample depends on the names of the cases alone: a commit that passes today passes tomorrow.

The cases of a function are dealt out in turn, in the order of the hashes of their names, so that neighbours, which are
alike, are in different samples. Each sample has a case of each function at least. Marks multiply: a test marked
`sweep(2)` that a conftest marks `sweep(4)` has eight parts. `sweep(2, among=NAME)` deals out the cases of a name in the
place of those of a function. In the folders of `FOLDERS` tests with cases are sweeps unless they are marked: there
`sweep(1)` runs all cases, which tests do that take no time. Tests of wrong calls, by their names, run all cases.
A case that is marked `always` is in each sample: no other case finds some fault of `tests/mutants`.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import pytest

SAMPLE = "25"
"""The sample of an ordinary run."""

_COMPILING = ("autodiff", "bench", "kernel", "kernels", "lang", "lower", "nn", "testing")
FOLDERS = {"tests/meshes/": 6} | {f"tests/{folder}/": 6 for folder in _COMPILING}
"""Folders of tests that compile, and the parts of their sweeps."""

_REFUSALS = re.compile(r"::test_(wrong_|refused|what_is_refused|\w*that_\w*refuses|\w*that_are_refused)")


def choose(config: pytest.Config) -> str:
    """The sample of a run: a number, or "all"."""
    asked = str(config.getoption("--sweep"))
    if asked != "all" and not asked.isdigit():
        raise pytest.UsageError(f"--sweep: expected a number or 'all'; got {asked!r}")
    return asked


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests with cases in `FOLDERS` that have no mark of their own."""
    for item in items:
        parts = next((n for folder, n in FOLDERS.items() if item.nodeid.startswith(folder)), 1)
        if parts > 1 and hasattr(item, "callspec") and not item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.sweep(parts))


def left_out(items: Sequence[pytest.Item], sample: str) -> list[pytest.Item]:
    """The cases of sweeps that a sample does not run."""
    if sample == "all":
        return []
    dealt = defaultdict[tuple[str, int, bool], list[pytest.Item]](list)
    functions = defaultdict[tuple[str, bool], list[tuple[int, pytest.Item]]](list)
    for item in items:
        markers = list(item.iter_markers("sweep"))
        always = _REFUSALS.search(item.nodeid) or any(item.iter_markers("always"))
        parts = 1 if always else prod(marker.args[0] for marker in markers)
        among = [marker.kwargs["among"] for marker in markers if "among" in marker.kwargs]
        # An ordinary run leaves out what is slow; the others have samples of their own.
        slow, function = any(item.iter_markers("slow")), item.nodeid.partition("[")[0]
        functions[function, slow].append((parts, item))
        if parts > 1:
            dealt[among[0] if among else function, parts, slow].append(item)
    every = ((name, parts, cases) for (name, parts, _), cases in dealt.items())
    gone = {item for group in every for item in _of_other_samples(*group, int(sample))}
    for (name, _), cases in functions.items():
        if all(item in gone for _, item in cases):
            gone.remove(_one_of(name, cases, int(sample)))
    return [item for item in items if item in gone]


def _of_other_samples(name: str, parts: int, cases: list[pytest.Item], sample: int) -> list[pytest.Item]:
    """The cases of other samples; each name begins at a number of its own, so that all samples have as much to do."""
    first = sample + _hash(name)
    return [item for place, item in enumerate(_in_order(cases)) if (place - first) % parts]


def _one_of(name: str, cases: list[tuple[int, pytest.Item]], sample: int) -> pytest.Item:
    """The case that runs where the sample has none of a function: one of those that run most often."""
    least = min(parts for parts, _ in cases)
    often = _in_order([item for parts, item in cases if parts == least])
    return often[(sample + _hash(name)) % len(often)]


def _in_order(cases: list[pytest.Item]) -> list[pytest.Item]:
    return sorted(cases, key=lambda item: (_hash(item.nodeid), item.nodeid))


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())
