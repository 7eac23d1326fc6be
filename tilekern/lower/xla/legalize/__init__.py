"""The portable backend takes every Func of the IR as it is: its passes are checks."""

from __future__ import annotations

from functools import partial

from tilekern.ir.core import Func
from tilekern.lower.sizes import LONGEST_INT32, refuse_large
from tilekern.lower.xla.plan.memory_budget import refuse_beyond_memory
from tilekern.passes import pipeline
from tilekern.passes.pipeline import Pass, Rounds
from tilekern.passes.remove_derivatives import remove_derivatives

PASSES: tuple[Pass | Rounds, ...] = (
    remove_derivatives,
    partial(refuse_large, backend="the portable backend", longest=LONGEST_INT32),
    refuse_beyond_memory,
)
"""All passes of the backend."""


def legalize(func: Func) -> Func:
    """The Func, if the backend has room for it.

    Raises:
      ResourceError: intermediate values take more than half of this machine's memory.
      TargetError: an array is longer, or the grid larger, than the backend counts.
    """
    return pipeline.run(func, PASSES)
