"""Block sizes that the schedules of several kernels share."""

from __future__ import annotations

from tilekern.ir.core import cdiv


def even(extent: int, limit: int) -> int:
    """A block of at most `limit` that cuts `extent` into tiles of nearly equal size.

    Where it divides the extent, there is no ragged tile to compute, and none to compile.
    """
    return max(1, cdiv(extent, max(1, cdiv(extent, limit))))
