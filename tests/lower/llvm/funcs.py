"""Funcs of one program that load whole arrays, compute, and store whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilekern.ir.core import Func, Value
from tilekern.ir.verify import verify
from tilekern.testing.support import Sketch


def func_of(make: Callable[[Sketch], Sequence[Value]]) -> Func:
    """The Func that stores the tiles that `make` returns, each to an output of its own."""
    b = Sketch()
    func = b.func("made", lambda: make(b))
    verify(func)
    return func
