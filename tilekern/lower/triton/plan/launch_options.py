"""Launch options of a program for which neither its schedule nor its call gives any."""

from __future__ import annotations

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func
from tilekern.lower.triton.calibration import (
    DOT_WARPS,
    ELEMENTS_PER_THREAD,
    LARGE_DOT,
    LARGE_DOT_WARPS,
    MAX_DEFAULT_WARPS,
)


def default_warps(func: Func, lanes: int) -> int:
    """The number of warps of `lanes` threads for the size of the largest dot, or of the largest tile without dots."""
    dots = [op.result.tile.size for op in func.walk() if isinstance(op, Dot)]
    if dots:
        return (LARGE_DOT_WARPS if max(dots) >= LARGE_DOT else DOT_WARPS) * 32 // lanes
    largest = max((v.tile.size for op in func.walk() for v in op.results), default=1)
    warps = 1
    while warps < MAX_DEFAULT_WARPS * 32 // lanes and warps * lanes * ELEMENTS_PER_THREAD < largest:
        warps *= 2
    return warps
