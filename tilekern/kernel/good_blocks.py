"""Blocks that nobody chose: by the analytic model of the target, from a few traces of the body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tilekern import source
from tilekern.ir.core import Func
from tilekern.kernel.choice import Tunable
from tilekern.lower.target import Target
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce

if TYPE_CHECKING:
    from tilekern.kernel.body import Body

_LEAST = 50e-6
"""Seconds, by the model, from which other blocks than the defaults are looked for."""
_GAIN = 1.5
"""The factor by which other blocks must be faster, by the model, to replace a default."""
_START = 64  # of a block without a default, for the first trace


def good_blocks(
    body: Body, target: Target, stated: Mapping[str, Tunable], free: Sequence[str]
) -> Mapping[str, Tunable]:
    """The sizes of blocks that neither the call nor a schedule gives.

    A block without a default gets the size of the model. The defaults of the others stay, unless the model finds sizes
    with which the call is `_GAIN` times as fast. They stay, too, if the call takes less than `_LEAST`, if the target
    has no model, and if the body does not take other sizes.

    Args:
      body: the body, on arguments of given types.
      target: the target.
      stated: blocks, choices and launch options that the call or the schedule gives.
      free: the other blocks.
    """
    signature = body.call.signature
    needed = [name for name in free if name not in signature.defaults]
    if not (needed or _may_replace(body, target)):
        return {}
    from tilekern import blocks  # only calls with such blocks pay for the import

    model = blocks.model_of(target)
    if model is None:
        return {}
    start = {**dict.fromkeys(needed, _START), **signature.defaults, **stated}
    if not set(signature.tunables) <= start.keys():
        return {}  # a choice without a value, which is an error

    def func_with(sizes: Mapping[str, Tunable]) -> Func:
        return cse(dce(body.trace(tuple((name, sizes[name]) for name in signature.tunables)).tracing.func))

    def seconds(sizes: Mapping[str, Tunable]) -> float:
        return float(model(blocks.tiling(func_with(sizes))))

    # An error of the user's body: the trace with the defaults, or with `start`, raises it again.
    with suppress(Exception):
        own = seconds(start)
        if not needed and own < _LEAST:
            return {}
        chosen = {**start, **blocks.fastest(func_with, start, free, model)}
        if needed or seconds(chosen) * _GAIN < own:
            return {name: chosen[name] for name in free}
    return {name: start[name] for name in needed}


def _may_replace(body: Body, target: Target) -> bool:
    """True if the defaults may be replaced: of users' kernels, on a target whose compiler makes code of blocks.

    The portable target shows a kernel as it is written. The library's own kernels have schedules, or defaults that were
    measured.
    """
    return target.backend != "xla" and not source.is_prebuilt(body.call.definition.loc)
