"""Split the text form of a Func into tokens."""

import re
from collections.abc import Iterator

from tilekern.ir.records import record
from tilekern.source import Loc

FILE = "<tile text>"
"""The file that locations in a text name."""

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<value>%\w+(?:\.\d+)?)
    | (?P<bytes>0x(?:[0-9a-f]{2})+)
    | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<mark>\+:|//|[-+*%@:=,!(){}\[\]<>])
    | (?P<bad>.)""",
    re.VERBOSE | re.ASCII,
)


@record
class Token:
    """A word of the text form: its kind is a group of `_TOKEN` or `"end"`."""

    kind: str
    text: str
    loc: Loc


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text up to the first bad token, then a token of kind "end"."""
    line, begin = 1, 0
    for match in _TOKEN.finditer(text):
        kind, word = str(match.lastgroup), match.group()
        if kind != "space":
            yield Token(kind, word, Loc(FILE, line, match.start() - begin, match.end() - begin))
        if kind == "bad":
            break
        if "\n" in word:
            line, begin = line + word.count("\n"), match.start() + word.rindex("\n") + 1
    yield Token("end", "the end of the text", Loc(FILE, line, len(text) - begin))
