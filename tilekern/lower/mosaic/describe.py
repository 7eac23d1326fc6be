"""A plan in words."""

from __future__ import annotations

from tilekern.lower.mosaic.plan import Plan


def describe(found: Plan) -> str:
    """What became of each loop and each access of a kernel, and what it costs."""
    return f"{found.func.name} on {found.chip.name}: grid {found.grid}, VMEM {found.vmem} bytes"
