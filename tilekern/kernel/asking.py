"""The target that calls inside of an op, or of a rule for derivatives, inherit from the call around them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tilekern.lower.target import Target

_asked: ContextVar[str | None] = ContextVar("tilekern_asked", default=None)


def inherited_target() -> str | None:
    """The name of the target that calls ask for here, if they do not say one themselves."""
    return _asked.get()


@contextmanager
def asking(target: Target | None) -> Generator[None]:
    """Calls inside that ask for no target ask for this one."""
    token = _asked.set(None if target is None else target.asked_as)
    try:
        yield
    finally:
        _asked.reset(token)
