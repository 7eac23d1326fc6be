"""Slot use: the slots of the core's units that each bundle fills, from a table that the compiler dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilekern.estimate.tpu.bundles import DumpError


@dataclass(frozen=True)
class Slots:
    """The table.

    Attributes:
      capacity: slots of each unit in a bundle.
      rows: a bundle's use of each unit, in the order of `capacity`.
    """

    capacity: dict[str, int]
    rows: tuple[tuple[int, ...], ...]

    def used(self, executed: Sequence[int]) -> dict[str, int]:
        """The number of slots of each unit that a run fills; `executed` counts the executions of each bundle."""
        if abs(len(self.rows) - len(executed)) > 1:
            raise DumpError(f"a table of {len(self.rows)} bundles for a program of {len(executed)}")
        totals = dict.fromkeys(self.capacity, 0)
        for times, row in zip(executed, self.rows, strict=False):
            if times:
                for unit, slots in zip(totals, row, strict=True):
                    totals[unit] += times * slots
        return totals


def parse(text: str) -> Slots:
    """The table of a `hlo-static-per-bundle-utilization` dump.

    Raises:
      DumpError: it has another form.
    """
    lines = text.splitlines()
    if len(lines) < 4 or "CAPAC" not in lines[0] or "UTILIZATION" not in lines[3]:
        raise DumpError(f"not a table of slots: {text[:200]!r}")
    units, capacity = [unit.strip() for unit in lines[1].split(",")], [int(x) for x in lines[2].split()]
    rows = tuple(tuple(int(x) for x in line.split()) for line in lines[4:] if line.strip())
    if {len(units)} != {len(capacity), *map(len, rows)}:
        raise DumpError(f"a table whose rows have not {len(units)} columns")
    return Slots(dict(zip(units, capacity, strict=True)), rows)
