"""Lines that the plans of several backends share: the axes of the grid and the loops of a Func, in words."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tilekern.ir.control import Fold, While
from tilekern.ir.core import Axis, Func, Op
from tilekern.ir.quote import visible


def axis_text(axis: Axis) -> str:
    """The tiles of an axis, and the order in which they start."""
    order = ", last tile first" if axis.descending else ""
    order += f", {axis.group} tiles before the next axis steps" if axis.group else ""
    return f"{axis.tiles:,} tiles of {axis.block:,}, {axis.extent:,} elements{order}"


def loop_lines(func: Func) -> Iterator[str]:
    """One line for each loop of a program, in program order."""
    for op in func.walk():
        if isinstance(op, Fold):
            text = f"{op.axis.name}: at most {axis_text(op.axis)}"
            yield f"{_place(op)}{text}{', in descending order' if op.reverse else ''}"
        elif isinstance(op, While):
            yield f"{_place(op)}while: as long as its condition holds"


def section(head: str, lines: Iterator[str]) -> list[str]:
    """A head and its lines, indented; nothing without lines."""
    indented = [f"  {visible(line)}" for line in lines]
    return [head, *indented] if indented else []


def _place(op: Op) -> str:
    return f"{os.path.basename(op.loc.file)}:{op.loc.line} " if op.loc.line else ""
