"""`tk.debug_print` and `tk.device_assert` as statements of Triton."""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.debug import Assert, Print
from tilekern.ir.quote import quoted, visible
from tilekern.ir.types import is_float8
from tilekern.lower.triton.emit.source_text import Writer
from tilekern.lower.triton.legalize.padded_print import PaddedPrint
from tilekern.lower.triton.program import PrintedValue

_PRINT, _ASSERT = "tl.device_print(", "tl.device_assert("


class DebugStatements:
    """Writes the statements, and keeps formats and messages for Triton's interpreter."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._prints: list[PrintedValue] = []
        self._messages: list[str] = []

    def write(self, op: Print | Assert, operands: Sequence[str]) -> None:
        """Write an op, whose operands are expressions of whole tiles."""
        if isinstance(op, Assert):
            self._messages.append(op.message)
            self._writer.line(f"{_ASSERT}{operands[0]}, {quoted(visible(op.message))})", op.loc)
        else:
            assert isinstance(op, PaddedPrint), op
            self._print(op, operands)

    def prints(self) -> dict[int, PrintedValue]:
        """The printed values by the line of the body on which they are printed."""
        return dict(zip(self._lines(_PRINT), self._prints, strict=True))

    def messages(self) -> dict[int, str]:
        """The messages of assertions by the line of the body on which they stand."""
        return dict(zip(self._lines(_ASSERT), self._messages, strict=True))

    def _print(self, op: PaddedPrint, operands: Sequence[str]) -> None:
        """One statement for each value: `tl.device_print` has no format, and names values by the text before them."""
        values = [(label, number) for label, number in op.pieces if number is not None]
        if not values:
            self._prints.append(PrintedValue(op.format))
            self._writer.line(f"{_PRINT}{_label(op.pieces[0][0])})", op.loc)
        for place, (label, number) in enumerate(values, 1):
            self._prints.append(PrintedValue(op.format, number, op.shapes[number], last=place == len(values)))
            # Triton would print an 8-bit float as the integer of its bits.
            narrow = is_float8(op.operands[number].tile.dtype)
            value = f"({operands[number]}).to(tl.float32)" if narrow else operands[number]
            self._writer.line(f"{_PRINT}{_label(label)}, {value})", op.loc)

    def _lines(self, call: str) -> list[int]:
        """The numbers of the lines that begin with a call, in the order of writing; `Writer.prune` keeps them all."""
        return [number for number, line in enumerate(self._writer.lines, 1) if line.lstrip().startswith(call)]


def _label(text: str) -> str:
    """The literal of the text in front of a value; Triton makes it a part of the format of C's `printf`."""
    return quoted(visible(text.strip(" ,;") or " ").replace("%", "%%"))
