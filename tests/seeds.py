"""Seeds of random programs: the same in each ordinary run, others in each run of `make test-full`.

pytest --seeds 7      seeds from 7,000,000 on; what one run has found, another one repeats by this option
"""

from __future__ import annotations

import pytest

STEP = 1_000_000
"""Between the first seeds of two numbers: more than any test takes."""

_number = 0


def begin(number: str) -> None:
    """Take the seeds of `number` in this process.

    Raises:
      pytest.UsageError: it is no number.
    """
    global _number
    if not number.isdigit():
        raise pytest.UsageError(f"--seeds: expected a number; got {number!r}")
    _number = int(number)


def of_chunk(chunk: int, size: int) -> range:
    """`size` seeds for the case `chunk` of a test, of which no other case has one."""
    first = _number * STEP + chunk * size
    return range(first, first + size)
