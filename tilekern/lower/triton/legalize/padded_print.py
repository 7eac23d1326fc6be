"""A print of padded tiles, which knows their shapes without the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilekern.ir.debug import Print


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedPrint(Print):
    """Print the operands, of which only the first lanes along each dim count.

    Attributes:
      shapes: for each operand, the shape that it had before it was padded.
    """

    name: ClassVar[str] = "padded_print"

    shapes: tuple[tuple[int, ...], ...]
