"""Lines of generated source, each with its place in the user's source; and the expressions that they are made of."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.quote import code_of, visible
from tilekern.ir.records import record
from tilekern.ir.types import DType, dtype_name, kind_of
from tilekern.lower.triton.dtypes import TRITON_DTYPES
from tilekern.source import UNKNOWN, Loc


def dtype_text(dtype: DType) -> str:
    """Triton's name of a dtype."""
    return f"tl.{TRITON_DTYPES[dtype_name(dtype)]}"


@record
class Expr:
    """A value as text.

    Attributes:
      text: a Python expression.
      shape: shape of the expression. It has the value's rank, and size 1 along dims where the value is constant; () is
        a scalar, which stands for a tile of any shape.
      number: the element of a constant, whose text is its literal; None otherwise.
      tight: True if the text binds stronger than any operator.
    """

    text: str
    shape: tuple[int, ...]
    number: Array | None = None
    tight: bool = True

    @property
    def operand(self) -> str:
        """The text as an operand, in parentheses if it needs them."""
        return self.text if self.tight else f"({self.text})"


def literal(number: Array) -> str:
    """The Python literal of an element; Triton gives it the dtype of the other operand."""
    if kind_of(number.dtype) != "float":
        return str(bool(number)) if number.dtype == np.bool_ else str(int(number))
    value = float(number)
    return repr(value) if np.isfinite(value) else f'float("{value}")'


def _depth(text: str) -> int:
    return len(text) - len(text.lstrip())


def is_tight(text: str) -> bool:
    """True for a name, with calls and indices behind it: these bind stronger than any operator."""
    return re.fullmatch(r"[A-Za-z_][\w.]*(\([^()]*\)|\[[^\[\]]*\])*", text) is not None


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as a Python tuple."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _named(loc: Loc) -> tuple[str, int, str]:
    """The part of a place that comments name."""
    return loc.file, loc.line, loc.region


_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*) = ")


class Writer:
    """Collects lines. Where the user's line or region changes, a comment names it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._places: list[Loc] = []
        self._depth = 1
        self._place = UNKNOWN

    def line(self, text: str, loc: Loc = UNKNOWN) -> None:
        """Append a line, which comes from the user's place `loc`."""
        if loc is not UNKNOWN and _named(loc) != _named(self._place):
            self._place = loc
            region = f" in {visible(loc.region)}" if loc.region else ""
            self._append(f"# {visible(os.path.basename(loc.file))}:{loc.line}{region}")
        self._append(text)

    @contextmanager
    def indented(self) -> Generator[None]:
        """Indent the lines that are written inside of the context."""
        self._depth += 1
        yield
        self._depth -= 1
        # Repeat the comment of the user's line behind an inner block.
        self._place = UNKNOWN

    def _append(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)
        self._places.append(self._place)

    @property
    def places(self) -> dict[int, Loc]:
        """The user's place of each line, by its number; the first line is number 1."""
        return dict(enumerate(self._places, 1))

    def prune(self) -> None:
        """Drop dead lines: assignments to variables that no other line reads, and comments without a line.

        An empty block gets a `pass`.
        """
        live = list(zip(self.lines, self._places, strict=True))
        while True:
            words = Counter(word for text, _ in live for word in re.findall(r"[A-Za-z_]\w*", code_of(text)))
            read = [line for line in live if not (m := _ASSIGNMENT.match(line[0])) or words[m.group(1)] > 1]
            if len(read) == len(live):
                break
            live = read
        commented = [
            line
            for line, next_line in pairwise([*live, ("#", UNKNOWN)])
            if not (line[0].lstrip().startswith("#") and next_line[0].lstrip().startswith("#"))
        ]
        filled: list[tuple[str, Loc]] = []
        for line, next_line in pairwise([*commented, ("", UNKNOWN)]):
            filled.append(line)
            if (
                line[0].endswith(":")
                and not line[0].lstrip().startswith("#")
                and _depth(next_line[0]) <= _depth(line[0])
            ):
                filled.append((" " * (_depth(line[0]) + 4) + "pass", line[1]))
        self.lines, self._places = [text for text, _ in filled], [place for _, place in filled]
