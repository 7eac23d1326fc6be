"""Sweeps: tests over many cases, of which an ordinary run takes a sample that changes with the date.

    @pytest.mark.sweep(8)      one case in eight is run; over eight days, each case once
    pytest --sweep 3           the sample of another day, to repeat a failure: a run prints its number at the end
    pytest --sweep all         all cases, as in `make test-full`

Cases are dealt out by the hash of their names: a new case moves no other one.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Sequence

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
    return [] if sample == "all" else [item for item in items if not _is_chosen(item, int(sample))]


def _is_chosen(item: pytest.Item, sample: int) -> bool:
    marker = item.get_closest_marker("sweep")
    if marker is None:
        return True
    (parts,) = marker.args
    return zlib.crc32(item.nodeid.encode()) % parts == sample % parts
