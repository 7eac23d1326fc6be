"""The target of a call is inherited by the calls inside of an op, or of a rule for derivatives."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tilekern.lower.target import Target

_inherited: ContextVar[str | None] = ContextVar("tilekern_inherited_target", default=None)


def inherited_target() -> str | None:
    """The name of the target for calls that do not name one; None for the best one of the platform."""
    return _inherited.get()


@contextmanager
def inherit_target(target: Target | None) -> Generator[None]:
    """Calls inside that name no target use this one."""
    token = _inherited.set(None if target is None else target.asked_as)
    try:
        yield
    finally:
        _inherited.reset(token)
