"""State of a trace: the axes and side effects so far, and the scopes that are open."""

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
    """Scope of the tiles of one fold or one kernel, the `owner`; a use of the tiles outside of it is an error."""

    owner: str
    open: bool = True

    def check(self) -> None:
        """Raise `TileScopeError` once the scope has ended."""
        if not self.open:
            raise TileScopeError(
                f"a tile of {self.owner} is used after {self.owner} has ended",
                expected=f"uses inside {self.owner} only",
                got="a Tile that was kept in a variable",
                fix="use the tile in the body that receives it, or compute what you need there and carry it out",
            )


@dataclass
class TraceState:
    """State of the current trace.

    Attributes:
      name: name of the kernel.
      function: body of the kernel.
      axes: grid axes declared so far.
      scope: scope of the kernel's parallel tiles.
      top: JAX's trace of the body itself, outside of its loops and nested functions.
      effects: line and kind ("store", "print" or "check") of each side effect so far, to find effects that JAX drops.
      outer: the enclosing trace, if there is one.
    """

    name: str
    function: Callable[..., Any] | None = None
    axes: list[Axis] = field(default_factory=list[Axis])
    scope: Scope = field(default_factory=lambda: Scope("the kernel"))
    top: Any = None
    effects: dict[Loc, str] = field(default_factory=dict[Loc, str])
    outer: TraceState | None = None


_state: ContextVar[TraceState | None] = ContextVar("tilekern_trace", default=None)


def current(caller: str) -> TraceState:
    """Return the current trace. If there is none, the error names the `caller`."""
    state = _state.get()
    if state is None:
        raise TraceError(
            f"{caller} is used outside a kernel",
            expected=f"{caller} in a function under @tilekern.kernel, while it is traced",
            got="a call with no kernel being traced",
            fix="call the kernel, or move this line into its body",
        )
    return state


def is_traced(function: Callable[..., Any]) -> bool:
    """True while `function`, the body of a kernel, is being traced, also in an outer trace."""
    state = _state.get()
    while state is not None and state.function is not function:
        state = state.outer
    return state is not None


def is_tracing_body() -> bool:
    """True while the body of any kernel is being traced."""
    return _state.get() is not None


@contextmanager
def tracing(state: TraceState) -> Generator[TraceState]:
    """Context in which `state` is the current trace."""
    state.outer = _state.get()
    token = _state.set(state)
    try:
        yield state
    finally:
        state.scope.open = False
        _state.reset(token)
