"""Launch options of a program for which neither its schedule nor its call gives any."""

from __future__ import annotations

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func


def default_warps(func: Func) -> int:
    """Two warpgroups for dots of 128 × 128 and more, otherwise about 16 elements of the largest tile for a thread."""
    dots = [op.result.tile.size for op in func.walk() if isinstance(op, Dot)]
    if dots:
        return 8 if max(dots) >= 128 * 128 else 4
    largest = max((v.tile.size for op in func.walk() for v in op.results), default=1)
    warps = 1
    while warps < 8 and warps * 32 * 16 < largest:
        warps *= 2
    return warps
