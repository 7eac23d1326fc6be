"""The error of a plan of a TPU kernel that breaks a rule."""

from __future__ import annotations

from tilekern.errors import PlanError


def require(condition: bool, summary: str, expected: str, got: str) -> None:
    """Raise unless a condition holds.

    Raises:
      PlanError: the condition does not hold.
    """
    if not condition:
        fix = 'this is a bug of tilekern: please report it with the kernel; target="cpu:xla" runs it without a plan'
        raise PlanError(f"plan of a TPU kernel: {summary}", expected=expected, got=got, fix=fix)
