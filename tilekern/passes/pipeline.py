"""The passes that every Func goes through before a backend sees it, in their order.

With the environment variable `TILEKERN_DEBUG=ir`, every pass is checked and its result printed to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tilekern.ir.core import Func
from tilekern.ir.verify import verify
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.elide_masks import elide_masks
from tilekern.passes.elide_ranges import elide_ranges
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.split_axes import split_axes

PIPELINE: tuple[Callable[[Func], Func], ...] = (
    *(canonicalize, split_axes, cse, dce),
    *(hoist_invariants, elide_ranges, elide_masks),
)

# What one round proves, the next one simplifies: two or three change something. More than this would be a bug.
_ROUNDS = 16


def run(func: Func, check: bool = False) -> Func:
    """The Func improved by all passes, again and again until none changes it.

    Args:
      func: a verified Func.
      check: verify the result of every pass.
    """
    debug = os.environ.get("TILEKERN_DEBUG") == "ir"
    for _ in range(_ROUNDS):
        before = func
        for improve in PIPELINE:
            previous, func = func, improve(func)
            if debug and func is not previous:
                sys.stderr.write(f"--- {improve.__name__}\n{func}\n")
            if (check or debug) and func is not previous:
                verify(func)
        if func is before:
            return func
    raise AssertionError(f"{func.name}: the passes do not come to an end")
