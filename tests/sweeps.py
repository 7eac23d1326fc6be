"""Sweeps: tests over many cases, of which an ordinary run takes a sample that changes with the date.

    @pytest.mark.sweep(8)      one case in eight is run; over eight days, each case once
    pytest --sweep 3           the sample of another day, to repeat a failure: a run prints its number at the end
    pytest --sweep all         all cases, as in `make test-full`; a case that is named alone may need it, too

The cases of a function are dealt out in turn: if there are at least as many as parts, some run each day. The order is
that of the hashes of their names, so that neighbours, which are alike, come on different days. Marks multiply: a test
marked `sweep(2)` that a conftest marks `sweep(4)` has eight parts. `sweep(2, among=NAME)` deals out the cases of a name
in the place of those of a function.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import pytest

# The sample of this run, for the processes of pytest-xdist: midnight must not give them different ones.
_VARIABLE = "TILEKERN_SWEEP"


def choose(config: pytest.Config) -> str:
    """The sample of a run: a number, or "all"."""
    asked = config.getoption("--sweep")
    found = os.environ.setdefault(_VARIABLE, str(datetime.date.today().toordinal())) if asked == "date" else asked
    if found != "all" and not found.isdigit():
        raise pytest.UsageError(f"--sweep: expected a number, 'date' or 'all'; got {found!r}")
    return found


def left_out(items: Sequence[pytest.Item], sample: str) -> list[pytest.Item]:
    """The cases of sweeps that a sample does not run."""
    if sample == "all":
        return []
    dealt = defaultdict[tuple[str, int, bool], list[pytest.Item]](list)
    for item in items:
        markers = list(item.iter_markers("sweep"))
        parts = prod(marker.args[0] for marker in markers)
        among = [marker.kwargs["among"] for marker in markers if "among" in marker.kwargs]
        # An ordinary run leaves out what is slow; the others have samples of their own.
        slow = any(item.iter_markers("slow"))
        if parts > 1:
            dealt[among[0] if among else item.nodeid.partition("[")[0], parts, slow].append(item)
    every = ((name, parts, cases) for (name, parts, _), cases in dealt.items())
    return [item for group in every for item in _not_of_the_day(*group, int(sample))]


def _not_of_the_day(name: str, parts: int, cases: list[pytest.Item], sample: int) -> list[pytest.Item]:
    """The cases of other days; each name begins on a day of its own, so that all days have as much to do."""
    day = sample + _hash(name)
    ordered = sorted(cases, key=lambda item: (_hash(item.nodeid), item.nodeid))
    return [item for place, item in enumerate(ordered) if (place - day) % parts]


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())
