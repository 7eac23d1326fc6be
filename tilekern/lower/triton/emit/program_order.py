"""Which tile of each axis a program works on: the grid as one number, for axes y and z of a GPU's grid end at 65535.

The last axis runs fastest. A descending axis is counted from its end; tiles of a grouped axis run through the group
before the next axis makes a step, so that programs that are near in time share what they load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilekern.ir.core import Axis


def decode_program_id(axes: tuple[Axis, ...], names: tuple[str, ...], fresh: Callable[[str], str]) -> Iterator[str]:
    """The lines that compute the index along each axis, under its name, from `tl.program_id(0)`.

    Axes of one tile get none: their index is 0.
    """
    long = [(axis, name) for axis, name in zip(axes, names, strict=True) if axis.tiles > 1]
    if not long:
        return
    program = fresh("program")
    yield f"{program} = tl.program_id(0)"
    rest = program
    while long:
        axis, name = long.pop()
        grouped = bool(long) and long[-1][0].group > 0
        count = axis.tiles * (long[-1][0].tiles if grouped else 1)
        within = f"{rest} % {count}" if len(long) > grouped else rest
        if grouped:
            yield from _grouped((long.pop(), (axis, name)), within, fresh)
        else:
            yield f"{name} = {_turned(axis, within)}"
        rest = f"{rest} // {count}"
        if len(long) > 1:
            yield f"{program} = {rest}"
            rest = program


def _turned(axis: Axis, index: str) -> str:
    """An index counted from the end of a descending axis; `%` and `//` bind stronger than `-`."""
    return f"{axis.tiles - 1} - {index}" if axis.descending else index


def _grouped(
    pair: tuple[tuple[Axis, str], tuple[Axis, str]], within: str, fresh: Callable[[str], str]
) -> Iterator[str]:
    """Two axes, the first in groups; the last group may have fewer tiles."""
    (first, first_name), (second, second_name) = pair
    group, place, size = fresh("group"), fresh("place"), fresh("group_size")
    members = first.group * second.tiles
    yield f"{group} = {within} // {members}"
    yield f"{place} = {within} % {members}"
    yield f"{size} = tl.minimum({first.tiles} - {group} * {first.group}, {first.group})"
    yield f"{first_name} = {_turned(first, f'({group} * {first.group} + {place} % {size})')}"
    yield f"{second_name} = {_turned(second, f'({place} // {size})')}"
