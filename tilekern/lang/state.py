"""What is known while one body is being traced: its axes, its stores, and which scopes are open."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tilekern.errors import TileScopeError, TraceError
from tilekern.ir.core import Axis
from tilekern.source import Loc


@dataclass
class Scope:
    """Where the tiles of one fold, or of one kernel, may be used."""

    what: str
    open: bool = True

    def check(self) -> None:
        """Raise `TileScopeError` once the scope has ended."""
        if not self.open:
            raise TileScopeError(
                f"a tile of {self.what} is used after {self.what} has ended",
                expected=f"uses inside {self.what} only",
                got="a Tile that was kept in a variable",
                fix="use the tile in the body that receives it, or compute what you need there and carry it out",
            )


@dataclass
class TraceState:
    """The trace that is going on.

    Attributes:
      name: the kernel's.
      function: its body.
      axes: the grid so far.
      scope: of the kernel's parallel tiles.
      top: JAX's trace of the body itself, not of a loop or a function in it.
      effects: the lines of all that must not get lost so far, and what stands there: a "store", "print" or "check".
      outer: the trace inside of which this one began, if there is one.
    """

    name: str
    function: Callable[..., Any] | None = None
    axes: list[Axis] = field(default_factory=list[Axis])
    scope: Scope = field(default_factory=lambda: Scope("the kernel"))
    top: Any = None
    effects: dict[Loc, str] = field(default_factory=dict[Loc, str])
    outer: TraceState | None = None


_state: ContextVar[TraceState | None] = ContextVar("tilekern_trace", default=None)


def current(what: str) -> TraceState:
    """The trace that is going on; `what` asks for it."""
    state = _state.get()
    if state is None:
        raise TraceError(
            f"{what} is used outside a kernel",
            expected=f"{what} in a function under @tilekern.kernel, while it is traced",
            got="a call with no kernel being traced",
            fix="call the kernel, or move this line into its body",
        )
    return state


def is_traced(function: Callable[..., Any]) -> bool:
    """True while the body `function` is being traced, or one that calls it."""
    state = _state.get()
    while state is not None and state.function is not function:
        state = state.outer
    return state is not None


@contextmanager
def tracing(state: TraceState) -> Generator[TraceState]:
    """Inside it, `state` is the trace that is going on."""
    state.outer = _state.get()
    token = _state.set(state)
    try:
        yield state
    finally:
        state.scope.open = False
        _state.reset(token)
