"""Grid decode: the index of a program along each axis, from its number.

A GPU's grid has one dimension here, because its axes y and z end at 65535. The last axis runs fastest. A descending
axis is counted from its end. On a grouped axis, all tiles of a group run before the next axis makes a step, so that
programs near in time share the tiles that they load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilekern.ir.core import Axis


def decode_program_id(
    axes: tuple[Axis, ...], names: tuple[str, ...], fresh: Callable[[str], str], number: str = "tl.program_id(0)"
) -> Iterator[str]:
    """The lines that compute the index along each axis from a program's number, in variables with the given names.

    Axes of one tile get no line: their index is 0.
    """
    long = [(axis, name) for axis, name in zip(axes, names, strict=True) if axis.tiles > 1]
    if not long:
        return
    program = fresh("program")
    yield f"{program} = {number}"
    undecoded = program
    while long:
        axis, name = long.pop()
        grouped = bool(long) and long[-1][0].group > 0
        count = axis.tiles * (long[-1][0].tiles if grouped else 1)
        within = f"{undecoded} % {count}" if len(long) > grouped else undecoded
        if grouped:
            yield from _grouped((long.pop(), (axis, name)), within, fresh)
        else:
            yield f"{name} = {_from_end(axis, within)}"
        undecoded = f"{undecoded} // {count}"
        if len(long) > 1:
            yield f"{program} = {undecoded}"
            undecoded = program


def _from_end(axis: Axis, index: str) -> str:
    """The index along an axis, counted from the end if it descends; `%` and `//` bind stronger than `-`."""
    return f"{axis.tiles - 1} - {index}" if axis.descending else index


def _grouped(
    pair: tuple[tuple[Axis, str], tuple[Axis, str]], within: str, fresh: Callable[[str], str]
) -> Iterator[str]:
    """The lines for a pair of axes, the first of which has groups; the last group may have fewer tiles."""
    (first, first_name), (second, second_name) = pair
    group, place, size = fresh("group"), fresh("place"), fresh("group_size")
    members = first.group * second.tiles
    yield f"{group} = {within} // {members}"
    yield f"{place} = {within} % {members}"
    yield f"{size} = tl.minimum({first.tiles} - {group} * {first.group}, {first.group})"
    yield f"{first_name} = {_from_end(first, f'({group} * {first.group} + {place} % {size})')}"
    yield f"{second_name} = {_from_end(second, f'({place} // {size})')}"
