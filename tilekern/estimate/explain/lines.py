"""The user's lines of a Func: the ops that they became, and the work of each."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from tilekern import source
from tilekern.ir.core import Func, Op
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
    """What a backend makes of each access: gathers, atomics, and masks or the proofs that make them needless.

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


def shares(spent: Mapping[Place, float]) -> dict[Place, float]:
    """Parts of a whole that are 1 together."""
    total = sum(spent.values())
    return {place: part / total for place, part in spent.items()} if total else {}


def by_place(cost: Mapping[Op, float]) -> Counter[Place]:
    """Costs of ops, added up by their places."""
    spent = Counter[Place]()
    for op, amount in cost.items():
        if (place := place_of(op.loc)) is not None:
            spent[place] += amount  # pyright: ignore[reportArgumentType] -- a Counter of floats
    return spent
