"""Text that a user names, on its way into a program's text: names, file names, messages, formats.

Nothing of it reaches Triton source, LLVM IR, names of Pallas kernels or the text form of the IR but through `visible`,
which holds no line break of any language, or as the literal that `quoted` gives.
"""

from __future__ import annotations

import json
import re

# Strings and comments of generated Python, whose strings have double quotes. Either may contain the start of the other.
_NO_CODE = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*')


def visible(text: str) -> str:
    r"""`text` in printable ASCII on one line; other characters as Python's escapes.

    >>> print(visible("a file\nof größe.py"))
    a file\nof gr\xf6\xdfe.py
    """
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    r"""A literal in double quotes, in printable ASCII on one line: in JSON of `text`, in Python of ASCII text, too.

    >>> print(quoted('say "so"\n'))
    "say \"so\"\n"
    """
    return json.dumps(text).replace("\x7f", "\\u007f")


def code_of(text: str) -> str:
    """Generated Python without the contents of strings and comments, so that words of users are not taken for code.

    >>> code_of('print("x = 1")  # y = 2')
    'print("")  '
    """
    return _NO_CODE.sub(lambda match: '""' if match.group().startswith('"') else "", text)
