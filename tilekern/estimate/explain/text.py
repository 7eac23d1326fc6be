"""An explanation as text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilekern.estimate.quantities import duration, percent

if TYPE_CHECKING:
    from tilekern.estimate.explain.explanation import Explanation, LineReport

NO_REGION = "(no region)"
"""The name of what lies outside of all regions."""

_BAR = 10  # characters of the bar of a share


def text(explanation: Explanation, colour: bool = False) -> str:
    """The explanation for a terminal.

    Args:
      explanation: the explanation.
      colour: True for ANSI colours.
    """
    return "\n".join(_lines(explanation, _Paint(colour)))


class _Paint:
    """ANSI colours, or none."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and text else text


def _lines(explanation: Explanation, paint: _Paint) -> Iterator[str]:
    if explanation.estimate is None:
        yield paint("1", f"{explanation.kernel} on {explanation.target}")
        yield f"  no estimate: {explanation.unestimated}"
    else:
        head, *details = str(explanation.estimate).splitlines()
        yield paint("1", head)
        yield from details
    yield ""
    file = None
    for line in explanation.lines:
        if line.file != file:
            file = line.file
            yield paint("90", os.path.basename(file))
        yield from _line(line, paint)
    if explanation.shares_of:
        yield paint("90", f"shares: of the {explanation.shares_of}")
    if explanation.regions:
        yield ""
        yield paint("1", "regions")
        yield from (f"{_share(part, paint)} {name or NO_REGION}" for name, part in explanation.regions.items())
    yield ""
    yield paint("1", "memory")
    yield from (f"  {name}: {amount}" for name, amount in explanation.memory.items())
    if explanation.settings:
        yield paint("1", "settings")
        yield "  " + ", ".join(f"{name} = {value}" for name, value in explanation.settings.items())
    if explanation.tried or explanation.refused_changes or explanation.untried:
        yield paint("1", "changes that help, each compiled")
        yield from _changes(explanation, paint)


def _line(line: LineReport, paint: _Paint) -> Iterator[str]:
    yield f"{_share(line.share, paint)} {line.line:>5} | {paint('36', line.text)}"
    yield from (f"{'':>{_BAR + 14}} {said}" for said in line.became)


def _share(share: float | None, paint: _Paint) -> str:
    bar = "█" * round((share or 0.0) * _BAR)
    return f"{'' if share is None else percent(share):>6} {paint('33', f'{bar:<{_BAR}}')}"


def _changes(explanation: Explanation, paint: _Paint) -> Iterator[str]:
    for change in explanation.changes:
        better = paint("32", f"{change.gain:.2f} × as fast")
        yield f"  {change.setting} = {change.after} for {change.before}: {duration(change.seconds)}, {better}"
    refused = len(explanation.refused_changes)
    none = "" if explanation.changes else "none; "
    yield f"  {none}{explanation.tried} compiled" + (f", {refused} refused by the target" if refused else "")
    if explanation.untried:
        yield f"  not tried, for lack of time: {', '.join(explanation.untried)}"
