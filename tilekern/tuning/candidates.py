"""The settings that a search tries: blocks, choices, launch options, and the emitter where it is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import cast

from tilekern.errors import ArgumentError
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.kernel.choice import Tunable
from tilekern.kernel.signature import Signature
from tilekern.lang.tiles import describe
from tilekern.lower.backend import OPEN
from tilekern.lower.target import Target, device_of

type Settings = Mapping[str, Tunable]

_LAUNCH = {"num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5)}
_UNSET = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}  # near what backends take if nobody says a number


EMITTER = "emitter"
"""The name in settings of the emitter of a program."""


@dataclass(frozen=True)
class Space:
    """The settings around those of a kernel: each moves along a list of values.

    Attributes:
      values: by name the values, in order.
      own: the settings of the schedule; a launch option that it leaves out is missing.
      ranked: the settings that a model takes for the fastest, in this order.
    """

    values: Mapping[str, Sequence[Tunable]]
    own: Settings
    ranked: Sequence[Settings] = ()

    def near(self, start: Settings) -> Iterator[Settings]:
        """In turns one of the ranked settings, and one of all settings, in the order of their steps from `start`."""
        return _in_turns([iter(self.ranked), self._around(start)])

    def _around(self, start: Settings) -> Iterator[Settings]:
        seen, layer = {_frozen(start)}, [dict(start)]
        while layer:
            reached: list[dict[str, Tunable]] = []
            for settings in layer:
                for neighbour in self._neighbours(settings):
                    if _frozen(neighbour) not in seen:
                        seen.add(_frozen(neighbour))
                        reached.append(neighbour)
                        yield neighbour
            layer = reached

    def _neighbours(self, settings: Settings) -> Iterator[dict[str, Tunable]]:
        for name, values in self.values.items():
            now = settings.get(name, _UNSET.get(name))
            at = values.index(now) if now in values else -1
            steps = (at + 1, at - 1) if all(type(v) is int for v in values) else range(len(values))
            for step in steps:
                if 0 <= step < len(values) and step != at:
                    yield {**settings, name: values[step]}


@dataclass(frozen=True)
class EmitterSpaces:
    """The settings of several emitters, each of which has a schedule of its own.

    Attributes:
      spaces: the space of each emitter.
    """

    spaces: Mapping[str, Space]

    def near(self, start: Settings) -> Iterator[Settings]:
        """In turns a setting around `start`, and one of each other emitter, around its schedule's own settings."""
        first = str(start[EMITTER])
        blocks = {name: value for name, value in start.items() if name != EMITTER}
        streams = {first: self.spaces[first].near(blocks)}
        streams |= {name: chain([s.own], s.near(s.own)) for name, s in self.spaces.items() if name != first}
        return _in_turns([_of_emitter(name, stream) for name, stream in streams.items()])


def _of_emitter(emitter: str, stream: Iterator[Settings]) -> Iterator[Settings]:
    return ({EMITTER: emitter, **settings} for settings in stream)


def _in_turns(streams: Sequence[Iterator[Settings]]) -> Iterator[Settings]:
    """The first settings of each stream, the second of each, and so on, as long as any stream has some."""
    for turn in zip_longest(*streams):
        yield from (settings for settings in turn if settings is not None)


def emitters(func: Func, target: Target) -> tuple[str, ...]:
    """The emitters of a target that may take a kernel; () if there is nothing to choose.

    A warp-specialised program multiplies matrices.

    Args:
      func: the block IR of the kernel.
      target: the target.
    """
    is_open = target.emitter == OPEN and any(isinstance(op, Dot) for op in func.walk())
    return tuple(name for name in target.emitters if name != OPEN) if is_open else ()


def with_emitter(target: Target, emitter: str) -> Target:
    """The target with one of its emitters; the usual one has no name."""
    return replace(target, emitter="" if emitter == target.emitters[0] else emitter)


def _frozen(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in settings.items()))


def space(signature: Signature, own: Settings, fixed: Settings, func: Func, target: Target) -> Space:
    """The space of a kernel on a target.

    Args:
      signature: its parameters.
      own: the settings of its schedule.
      fixed: those that the call gives, which stay.
      func: the block IR with the schedule's own blocks.
      target: the target.
    """
    sizes = [n for param in func.params for n in param.ref.shape]
    sizes += [a.extent for a in (*func.axes, *(op.axis for op in func.walk() if isinstance(op, Fold)))]
    most = max(sizes, default=1)
    values: dict[str, Sequence[Tunable]] = {name: _sizes(own[name], most) for name in signature.blocks}
    values |= {name: choice.values for name, choice in signature.choices.items()}
    device = device_of(target)
    if device.emitter:
        values |= {name: tuple(sorted({*options, *_own(own, name)})) for name, options in _LAUNCH.items()}
        values |= {"num_ctas": tuple(1 << n for n in range(device.cluster.bit_length()))} if device.cluster > 1 else {}
    return Space({name: options for name, options in values.items() if name not in fixed}, own)


def _own(own: Settings, name: str) -> list[Tunable]:
    return [own[name]] if name in own else []


def _sizes(own: Tunable, most: int) -> Sequence[Tunable]:
    """The powers of two up to the largest extent, the extent itself, and the schedule's own block."""
    powers = [1 << n for n in range(max(most - 1, 1).bit_length())]
    return sorted({*powers, most, *([own] if isinstance(own, int) else [])})


def given(candidates: object, signature: Signature, emitters: Sequence[str] = ()) -> list[Settings]:
    """The candidates of a user: a sequence of settings, or by name the values of which all combinations are meant.

    Args:
      candidates: what the user gives.
      signature: the parameters of the kernel.
      emitters: the emitters that a candidate may name; a candidate that names none is tried with each.

    Raises:
      ArgumentError: there are none, or they do not fit the kernel.
    """
    rows = _rows(candidates) if candidates else None
    if rows is None or not rows:
        raise ArgumentError(
            "there are no candidates to try",
            expected='dicts, [{"block": 64, "num_warps": 4}, ...], or lists of values, {"block": [64, 128]}',
            got=f"candidates = {describe(candidates)}",
            fix="leave candidates out to search around the schedule's own",
        )
    if not emitters:
        return [signature.check_blocks(row, "candidates") for row in rows]
    return [settings for row in rows for settings in _with_each(row, signature, emitters)]


def _with_each(row: Settings, signature: Signature, emitters: Sequence[str]) -> Iterator[Settings]:
    blocks = {name: value for name, value in row.items() if name != EMITTER}
    checked = signature.check_blocks(blocks, "candidates")
    named = [row[EMITTER]] if EMITTER in row else emitters
    for emitter in named:
        if emitter not in emitters:
            raise ArgumentError(
                "candidates name an emitter that the target does not have",
                expected=f"one of {', '.join(map(repr, emitters))}",
                got=f"emitter = {describe(emitter)}",
                fix="leave the emitter out to try each",
            )
        yield {EMITTER: str(emitter), **checked}


def _rows(candidates: object) -> list[dict[str, Tunable]] | None:
    if isinstance(candidates, Mapping):
        rows: list[dict[str, Tunable]] = [{}]
        for name, options in cast(Mapping[object, object], candidates).items():
            if not isinstance(options, list | tuple):
                return None
            rows = [{**row, str(name): value} for row in rows for value in cast(Sequence[Tunable], options)]
        return rows
    if isinstance(candidates, list | tuple):
        listed = cast(Sequence[object], candidates)
        if all(isinstance(row, Mapping) for row in listed):
            return [dict(cast(Mapping[str, Tunable], row)) for row in listed]
    return None
