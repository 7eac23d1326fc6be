"""The code of a page of the documentation, run from top to bottom, and the pictures that the page asks for.

The Python blocks of a page are one program. A line `<!-- picture: EXPRESSION -->` stands for a picture: the expression
is evaluated behind the blocks above it, and gives a `Picture`, such as `kernel.trace(x).draw()`. `gallery` and `plots`
name modules that draw.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs import gallery, plots
from tilekern.ir.picture import Picture

# A block of Python, and behind it the block of text, if there is one, that shows what it prints; or a picture.
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<shown>.*?)^```\n)?|^<!-- picture: (?P<picture>.*?) -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of Python that has run.

    Attributes:
      line: its first line in the page's program, `<page>.py`.
      shown: the text that the page says the block prints.
      printed: the text that the block printed.
    """

    line: int
    shown: str
    printed: str


@dataclass(frozen=True)
class Drawn:
    """A picture that has been drawn, and the place of its mark in the page's text."""

    start: int
    end: int
    picture: Picture


def run(name: str, text: str) -> Iterator[Block | Drawn]:
    """Run the blocks of a page and draw its pictures, in their order.

    Args:
      name: the page's file, "tutorial.md". The program is `tutorial.py`, whose lines are those of the blocks.
      text: its Markdown.
    """
    file = Path(name).with_suffix(".py").name
    parts = list(PART.finditer(text))
    program = "".join(part["code"] or "" for part in parts)
    linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "docs", "gallery": gallery, "plots": plots}
    lines_above = 0
    for part in parts:
        if part["picture"] is not None:
            yield Drawn(*part.span(), eval(part["picture"], namespace))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * lines_above + part["code"], file, "exec"), namespace)
        yield Block(lines_above + 1, part["shown"] or "", printed.getvalue())
        lines_above += part["code"].count("\n")


def with_pictures(name: str, text: str) -> str:
    """The Markdown of a page with its pictures in the place of their marks; a page without marks is not run."""
    if "<!-- picture: " not in text:
        return text
    end, pieces = 0, list[str]()
    for part in run(name, text):
        if isinstance(part, Drawn):
            pieces += (text[end : part.start], f"<figure>{part.picture.svg}</figure>")
            end = part.end
    return "".join((*pieces, text[end:]))
