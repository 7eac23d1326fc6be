"""The user's lines of a Func, and its regions: the ops that lines became, and the work of each."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilekern import source
from tilekern.ir.core import Func
from tilekern.ir.memory import Atomic, Load, MemoryOp
from tilekern.source import Loc

Place = tuple[str, int]
"""A file and a line."""

Words = defaultdict[Place, dict[str, None]]
"""By place what the target makes of it; a dict keeps the order and drops repetitions."""


def place_of(loc: Loc) -> Place | None:
    """The place of a location; None for an unknown one."""
    return (loc.file, loc.line) if loc.line else None


def words() -> Words:
    """Words of no place."""
    return defaultdict(dict)


def add(to: Words, loc: Loc, *said: str) -> None:
    """Add words about the line of a location, if it is known."""
    if (place := place_of(loc)) is not None:
        to[place].update(dict.fromkeys(said))


def accesses(func: Func, masks: bool) -> Words:
    """By place the words of each access: gathers, atomics, and masks or the proofs that make them needless.

    Args:
      func: the Func.
      masks: False for a backend that has masks of its own, and says so by itself.
    """
    said = words()
    for op in func.walk():
        if isinstance(op, MemoryOp):
            add(said, op.loc, *_access(op, masks))
    return said


def _access(op: MemoryOp, masks: bool) -> Iterable[str]:
    name, kind = op.ref.name, "load" if isinstance(op, Load) else "update" if isinstance(op, Atomic) else "store"
    if any(dim.kind in ("gather", "along") for dim in op.access.dims):
        yield f"{name}: gather, a position for each lane"
    if isinstance(op, Atomic):
        yield f"{name}: atomic"
    if not masks or not op.access.shape:
        return
    if op.mask is not None:
        yield f"{name}: masked {kind}"
    elif op.access.in_bounds:
        yield f"{name}: {kind} without a mask, proved in bounds"
    else:
        yield f"{name}: {kind} with a mask at the edge"


def source_of(place: Place) -> str:
    """The text of a line, "" if the source cannot be read."""
    return source.line_of(*place).rstrip("\n")


def ordered(places: Iterable[Place]) -> list[Place]:
    """Places by file and line."""
    return sorted(set(places), key=lambda place: (os.path.basename(place[0]), place))


@dataclass(frozen=True)
class Shares:
    """Parts of a whole that are 1 together.

    Attributes:
      lines: the part of each line.
      regions: the part of each region without the regions inside of it; "" has the part outside of all regions. Empty
        for a kernel without regions.
    """

    lines: Mapping[Place, float]
    regions: Mapping[str, float]


def shares(spent: Iterable[tuple[Loc, float]]) -> Shares:
    """The parts of lines and of regions, from costs at places; costs at unknown places are left out."""
    lines, regions = defaultdict[Place, float](float), defaultdict[str, float](float)
    for loc, amount in spent:
        if (place := place_of(loc)) is not None:
            lines[place] += amount
            regions[loc.region] += amount
    total = sum(lines.values())
    if not total:
        return Shares({}, {})
    named = {name: amount / total for name, amount in regions.items()} if any(regions) else {}
    return Shares({place: amount / total for place, amount in lines.items()}, named)
