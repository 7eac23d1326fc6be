"""The driver that runs passes, and the passes that every Func goes through before a backend sees it.

With `verify` in the environment variable `TILEKERN_DEBUG`, the result of every pass is verified; with `ir`, it is also
printed to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tilekern.debug_options import debug_options
from tilekern.errors import TilekernError, VerifyError
from tilekern.ir.core import Func
from tilekern.ir.records import record
from tilekern.ir.verify import verify
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.elide_masks import elide_masks
from tilekern.passes.elide_ranges import elide_ranges
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.split_axes import split_axes

type Pass = Callable[[Func], Func]
"""A rewrite, or a check that returns its Func. A `partial` binds the target for which a pass works."""

# Two or three rounds change a Func. More rounds than this would be a bug.
_MOST_ROUNDS = 16


@record
class Rounds:
    """Passes that run in rounds until a round changes nothing: each pass simplifies what another pass proved."""

    passes: tuple[Pass, ...]


IMPROVE = Rounds(
    (canonicalize, split_axes, cse, dce, hoist_invariants, elide_ranges, elide_masks),
)
"""The passes of every Func; a target runs them again after a pass that makes new work for them."""


def run(func: Func, passes: Sequence[Pass | Rounds] = (IMPROVE,), *, check: bool = False) -> Func:
    """Run passes on a Func, in their order.

    Args:
      func: a verified Func.
      passes: the passes, and rounds of passes, to run.
      check: True to verify the result of every pass.

    Raises:
      TilekernError: a pass refuses the Func. Any other error is a bug, and has a note that names the pass.
    """
    options = debug_options()
    prints = "ir" in options
    check = check or prints or "verify" in options
    for step in passes:
        func = (
            _run_rounds(func, step, check, prints) if isinstance(step, Rounds) else _run_pass(func, step, check, prints)
        )
    return func


def verified(func: Func) -> Func:
    """Verify the Func: the last pass of a target, so that a bug of a pass does not show as a bug of the emitter."""
    verify(func)
    return func


def name_of(pass_: Pass) -> str:
    """The name of a pass."""
    return function_of(pass_).__name__


def function_of(pass_: Pass) -> Any:
    """The function of a pass, without the bound target."""
    return pass_.func if isinstance(pass_, partial) else pass_


# The rounds that are known to change nothing of a Func: most passes of a target between two rounds find no work.
_SETTLED: WeakKeyDictionary[Func, set[Rounds]] = WeakKeyDictionary()


def _run_rounds(func: Func, rounds: Rounds, check: bool, prints: bool) -> Func:
    if rounds in _SETTLED.get(func, ()):
        return func
    unchanged = 0  # how many passes in a row, up to this one, changed nothing
    for pass_ in rounds.passes * _MOST_ROUNDS:
        before, func = func, _run_pass(func, pass_, check, prints)
        unchanged = unchanged + 1 if func is before else 0
        if unchanged == len(rounds.passes):
            _SETTLED.setdefault(func, set()).add(rounds)
            return func
    raise AssertionError(f"{func.name}: {_MOST_ROUNDS} rounds of {', '.join(map(name_of, rounds.passes))} change it")


def _run_pass(func: Func, pass_: Pass, check: bool, prints: bool) -> Func:
    with _noted(pass_, func):
        result = pass_(func)
        if prints and result is not func:
            sys.stderr.write(f"--- {name_of(pass_)}\n{result}\n")
        if check and result is not func:
            verify(result)
    return result


@contextmanager
def _noted(pass_: Pass, func: Func):
    """Name the pass in errors that are bugs."""
    try:
        yield
    except Exception as error:
        if isinstance(error, VerifyError) or not isinstance(error, TilekernError):
            error.add_note(f"in the pass {name_of(pass_)}, on {func.name}; TILEKERN_DEBUG=ir prints the Func before it")
        raise
