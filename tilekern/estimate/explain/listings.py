"""Programs as text, with the user's line of each of their lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tilekern.estimate.explain.explanation import Listing
from tilekern.estimate.explain.lines import Place, place_of
from tilekern.estimate.gpu.sass import INSTRUCTION, ORIGIN
from tilekern.ir.core import Func
from tilekern.ir.text import to_text
from tilekern.lower.triton.lowering import TritonLowering

_LOCATION = re.compile(r' @ "((?:[^"\\\\]|\\\\.)*)":(\d+):\d+-\d+ in .*$')


def of_ir(func: Func, numbers: Mapping[Place, int]) -> Listing:
    """The block IR.

    Args:
      func: the Func.
      numbers: the number of each of the user's lines.
    """
    lines: list[str] = []
    origins: list[int] = []
    for line in to_text(func, locations=True).splitlines():
        match = _LOCATION.search(line)
        lines.append(line[: match.start()] if match else line)
        origins.append(numbers.get((match[1], int(match[2])), -1) if match else -1)
    return Listing("\n".join(lines), tuple(origins))


def plain(text: str) -> Listing:
    """A program whose lines do not tell where they come from."""
    return Listing(text, tuple(-1 for _ in text.splitlines()))


def of_triton(lowering: TritonLowering, numbers: Mapping[Place, int]) -> Listing:
    """Triton or Gluon source."""
    text = lowering.program.text
    return Listing(text, tuple(_numbers(lowering, range(1, text.count("\n") + 2), numbers)[: len(text.splitlines())]))


def of_sass(lowering: TritonLowering, sass: str, numbers: Mapping[Place, int]) -> Listing:
    """The instructions of a GPU, by the lines of Triton's source that comments of the disassembler name."""
    lines: list[str] = []
    of_source: list[int] = []
    number = 0
    for line in sass.splitlines():
        if origins := ORIGIN.findall(line):
            number = int(origins[-1])
        elif INSTRUCTION.match(line):
            lines.append(line.strip())
            of_source.append(number)
    return Listing("\n".join(lines), tuple(_numbers(lowering, of_source, numbers)))


def _numbers(lowering: TritonLowering, lines: Sequence[int], numbers: Mapping[Place, int]) -> list[int]:
    """For lines of the source the numbers of the user's lines."""
    locations = (lowering.program.lines.get(line) for line in lines)
    places = (None if loc is None else place_of(loc) for loc in locations)
    return [-1 if place is None else numbers.get(place, -1) for place in places]
