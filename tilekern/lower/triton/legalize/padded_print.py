"""An op that prints padded tiles without their padding."""

from __future__ import annotations

from typing import ClassVar

from tilekern.ir.debug import Print
from tilekern.ir.records import record


@record(eq=False, kw_only=True)
class PaddedPrint(Print):
    """Print the operands without the added lanes.

    Attributes:
      shapes: for each operand, its shape before padding.
    """

    name: ClassVar[str] = "padded_print"

    shapes: tuple[tuple[int, ...], ...]
