"""Ops for finding faults: `Print` and `Assert`. How often and in which order they run is up to the backend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import ClassVar

from tilekern.errors import VerifyError
from tilekern.ir.core import Op, require
from tilekern.ir.records import record
from tilekern.ir.types import BOOL, TileType


@record(eq=False, kw_only=True)
class Print(Op):
    """Print the operands in a format of `str.format`."""

    name: ClassVar[str] = "print"
    pure: ClassVar[bool] = False

    format: str

    @property
    def pieces(self) -> list[tuple[str, int | None]]:
        """The format as pairs of a text and the number of the operand behind it; see `pieces`."""
        return list(pieces(self.format))

    def infer(self) -> tuple[TileType, ...]:
        count = len(self.tiles())
        try:
            numbers = [number for _, number in self.pieces if number is not None]
        except ValueError as error:
            raise VerifyError(f"{self.format!r} is no format of a print: {error}") from error
        require(all(number < count for number in numbers), f"the format {self.format!r} has no {count} fields")
        return ()


def pieces(format: str) -> Iterator[tuple[str, int | None]]:
    """Pairs of a text of a format and the number of the value behind it; None if the last text has no value behind it.

    "a {} b {}" has the pairs ("a ", 0) and (" b ", 1); "a {} b" has the pairs ("a ", 0) and (" b", None).

    Raises:
      ValueError: a field is neither `{}` nor `{0}`, with or without a `:` and a form; or some fields have numbers and
        others have none; or a form asks for 1000 characters or more.
    """
    text, fields = "", list[str]()
    for before, field, form, _ in Formatter().parse(format):
        text += before
        if field is None:
            continue
        if "{" in (form or "") or not re.fullmatch("[0-9]{0,9}", field):
            raise ValueError(f"the field {field!r} is no number")
        if re.search("[0-9]{4}", form or ""):
            raise ValueError(f"the form {form!r} asks for 1000 characters or more")
        if any(bool(earlier) != bool(field) for earlier in fields):
            raise ValueError("some fields have numbers and others have none")
        yield text, int(field or len(fields))
        text = ""
        fields.append(field)
    if text or not fields:
        yield text, None


@record(eq=False, kw_only=True)
class Assert(Op):
    """Stop with `message` unless every element of the operand, a bool tile, holds."""

    name: ClassVar[str] = "assert"
    pure: ClassVar[bool] = False

    message: str

    def infer(self) -> tuple[TileType, ...]:
        (predicate,) = self.tiles(1)
        require(predicate.dtype == BOOL, f"assert takes a bool, got {predicate}")
        return ()
