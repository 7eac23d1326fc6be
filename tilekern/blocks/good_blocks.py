"""Blocks that nobody chose: by the analytic model of the target, from a few traces of the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tilekern.blocks.choose import fastest, model_of
from tilekern.blocks.tiling import tiling
from tilekern.ir.core import Func
from tilekern.lower.target import Target
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce

_LEAST = 50e-6
"""Seconds, by the model, from which other blocks than the defaults are looked for."""
_GAIN = 1.5
"""The factor by which other blocks must be faster, by the model, to replace a default."""
_START = 64  # of a block without a default, for the first trace


def good_blocks(
    trace: Callable[[Mapping[str, Any]], Func],
    target: Target,
    known: Mapping[str, Any],
    free: Sequence[str],
    replaceable: bool,
) -> Mapping[str, int]:
    """The sizes of blocks that neither the call nor a schedule gives.

    A block without a default gets the size of the model. The defaults of the others stay, unless the model finds sizes
    with which the call is `_GAIN` times as fast. They stay, too, if the call takes less than `_LEAST`, if the target
    has no model, and if the body does not take other sizes.

    Args:
      trace: traces the body with sizes of all blocks and values of all choices.
      target: the target.
      known: blocks and choices by the call, the schedule or a default.
      free: the blocks that neither the call nor the schedule gives.
      replaceable: True if defaults may be replaced.
    """
    model = model_of(target)
    missing = [name for name in free if name not in known]
    # The portable target shows a kernel as it is written.
    if model is None or not (missing or (replaceable and target.backend != "xla")):
        return {}
    start = {**dict.fromkeys(missing, _START), **known}

    def func_with(blocks: Mapping[str, Any]) -> Func:
        return cse(dce(trace(blocks)))

    def seconds(blocks: Mapping[str, Any]) -> float:
        return float(model(tiling(func_with(blocks))))

    # An error of the user's body: the trace with the defaults, or with `start`, raises it again.
    with suppress(Exception):
        own = seconds(start)
        if not missing and own < _LEAST:
            return {}
        chosen = {**start, **fastest(func_with, start, free, model)}
        if missing or seconds(chosen) * _GAIN < own:
            return {name: chosen[name] for name in free}
    return {name: start[name] for name in missing}
