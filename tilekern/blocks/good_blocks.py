"""Blocks that nobody chose: by the analytic model of the target, from a few traces of the body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from tilekern.blocks.choose import Blocks, BodyError, Programs, by_speed, model_of, tilings
from tilekern.ir.core import Func
from tilekern.lower.target import DEFAULT, Target, backend_of

_LEAST = {"cpu": 50e-6}
"""Seconds, by the model, from which other blocks than the defaults are looked for: by platform, for others `_SHORT`."""
_SHORT = 5e-6  # where compiling takes far longer than looking
_GAIN = 1.5
"""The factor by which other blocks must be faster, by the model, to replace a default."""
_START = 64  # of a block without a default, for the first trace
_MOST_REFUSED = 8  # choices of blocks that the target refuses, until the start stays


class Refuses(Protocol):
    """True if the target does not lower a body with some sizes and values.

    A program that it lowers with a warning that it is large counts as refused, unless `large`.
    """

    def __call__(self, settings: Blocks, large: bool = False, /) -> bool: ...


def good_blocks(
    programs: Programs,
    refuses: Refuses,
    target: Target,
    known: Blocks,
    free: Sequence[str],
    replaceable: bool,
) -> Mapping[str, int]:
    """The sizes of blocks that neither the call nor a schedule gives.

    A block without a default gets the size of the model. The defaults of the others stay, unless the model finds sizes
    with which the call is `_GAIN` times as fast, or unless the target refuses them. They stay, too, if the call takes
    less than `_LEAST`, if the target has no model, and if the body does not take other sizes. Where the target takes no
    sizes without a warning that the program is large, it gets the fastest ones that it takes with it.

    Args:
      programs: returns the Funcs of a call, for sizes of all blocks and values of all choices.
      refuses: see `Refuses`.
      target: the target.
      known: blocks and choices by the call, the schedule or a default.
      free: the blocks that neither the call nor the schedule gives.
      replaceable: True if defaults may be replaced.
    """
    model = model_of(target)
    missing = [name for name in free if name not in known]
    # The portable target shows a kernel as it is written.
    if model is None or not (missing or (replaceable and target.backend != DEFAULT.backend)):
        return {}
    start = {**dict.fromkeys(missing, _START), **known}

    def checked(blocks: Blocks) -> Sequence[Func]:
        try:
            return programs(blocks)
        except Exception as error:  # of the user's body, which may raise anything
            raise BodyError from error

    def is_refused(blocks: Blocks, large: bool = False) -> bool:
        checked(blocks)
        return refuses(blocks, large)

    def seconds(blocks: Blocks) -> float:
        return float(sum(map(model, tilings(checked(blocks)))))

    # The trace with the defaults, or with `start`, raises the error of the user's body again.
    with suppress(BodyError):
        own = seconds(start)
        refused = not missing and is_refused(start)
        if not missing and not refused and own < _LEAST.get(target.platform, _SHORT):
            return {}
        takes_extents = backend_of(target).takes_extents
        ranked = islice(by_speed(checked, start, free, model, takes_extents=takes_extents), _MOST_REFUSED)
        choices = [{**start, **sizes} for sizes in ranked]
        for chosen in choices:
            if not missing and not refused and seconds(chosen) * _GAIN >= own:
                break
            if not is_refused(chosen):
                return {name: chosen[name] for name in free}
        if missing or refused:
            for chosen in choices:
                if not is_refused(chosen, large=True):
                    return {name: chosen[name] for name in free}
    return {name: start[name] for name in missing}
