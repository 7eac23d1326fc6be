"""Plans that a Func may have beside the one that is best for it."""

from __future__ import annotations

from typing import Literal

from tilekern.lower.mosaic import plan as planner
from tilekern.lower.mosaic.plan import Plan
from tilekern.lower.mosaic.serial import as_pairs, serial_of

Form = Literal["resident", "steps", "pairs"]


def in_form(plan: Plan, form: Form) -> Plan | None:
    """A plan of the same Func with its loop in VMEM, or in the grid in one of two ways; None if it cannot be so."""
    func, constants, chip = plan.func, plan.constants, plan.chip
    resident = planner._planned(func, constants, chip, None)
    if form == "resident":
        return resident
    serial = serial_of(func)
    if serial is not None and form == "pairs":
        serial = as_pairs(func, serial, resident.scalars)
    if serial is None or not planner._is_known(serial, resident.scalars):
        return None
    return planner._planned(func, constants, chip, serial)
