"""Places in the user's program.

A `Loc` is a file, a line and a span of columns. `current()` is the user's line that is being worked on: the place of
the innermost `at(loc)` block if there is one, otherwise of the innermost stack frame that belongs to the user. Frames
of this package do not belong to the user, nor do frames of packages and files that are registered as internal. Frames
of files below a folder that is registered with `register_kernels` do: such files hold kernels, like a user's files.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Decorators and context managers of the standard library call the compiler on behalf of whoever entered them.
_internal: list[str] = [_PACKAGE, contextlib.__file__, functools.__file__]
_internal_files: set[str] = set()
_kernels: list[str] = []


@dataclass(frozen=True)
class Loc:
    """A place in a source file; lines count from 1, columns from 0, `end_column` is exclusive (0: unknown).

    `region` is the path of names of the `tk.region`s around an op, outermost first, such as "scores/mask".
    """

    file: str
    line: int
    column: int = 0
    end_column: int = 0
    function: str = ""
    region: str = ""

    def __str__(self) -> str:
        file = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in self.file)
        return f"{file}:{self.line}"

    def snippet(self) -> str:
        """The line with a caret under the span, or "" if the source cannot be read."""
        text = line_of(self.file, self.line).rstrip("\n")
        if not text:
            return ""
        label = f"{self.line:>5} | "
        shown = f"{label}{text}"
        if self.end_column > self.column:
            # A span that continues on the next line is underlined to the end of its first line.
            width = max(1, min(self.end_column, len(text)) - self.column)
            shown += f"\n{' ' * (len(label) + self.column)}{'^' * width}"
        return shown


UNKNOWN = Loc("<unknown>", 0)
# Files of the code objects whose places were computed.
_seen: set[str] = set()
_current: ContextVar[Loc | None] = ContextVar("tilekern_loc", default=None)


def is_loaded(file: str) -> bool:
    """True if Python runs code of a file: of a module, or of a function that was traced.

    A location in a text of the IR may name any file. Only the source of loaded programs is read.
    """
    if file in _seen or file in linecache.cache:
        return True
    return any(getattr(module, "__dict__", {}).get("__file__") == file for module in list(sys.modules.values()))


def line_of(file: str, line: int) -> str:
    """One line of a file that is loaded, "" of any other."""
    return linecache.getline(file, line) if is_loaded(file) else ""


def register_internal(directory: str) -> None:
    """Frames of files below `directory` are never the user's."""
    _internal.append(os.path.abspath(directory) + os.sep)
    is_internal.cache_clear()


def register_internal_file(file: str) -> None:
    """Frames of `file` are never the user's, also if it is below a folder of kernels."""
    _internal_files.add(file)
    is_internal.cache_clear()


def register_kernels(directory: str) -> None:
    """Files below `directory` are kernels of the package itself: their frames are the user's."""
    _kernels.append(os.path.abspath(directory) + os.sep)
    is_internal.cache_clear()


@functools.cache  # each equation of a body asks, for each of its frames
def is_internal(file: str) -> bool:
    """True if `file` belongs to the compiler, or to a package it is built on, and not to the user."""
    if file in _internal_files:
        return True
    if any(file.startswith(d) for d in _kernels):
        return False
    return file.startswith("<frozen") or any(file.startswith(d) for d in _internal)


def _is_hidden(file: str, prebuilt: bool) -> bool:
    return is_internal(file) or (not prebuilt and any(file.startswith(d) for d in _kernels))


def _is_generated(frame: FrameType) -> bool:
    """True for methods that `dataclass` writes for classes of this package."""
    return frame.f_code.co_filename == "<string>" and frame.f_globals.get("__name__", "").startswith("tilekern.")


def is_prebuilt(loc: Loc) -> bool:
    """True if a place is in a kernel of the package itself."""
    return any(loc.file.startswith(d) for d in _kernels)


class at:
    """A context in which `current()` is `loc`; an unknown location changes nothing.

    A class, for a generator costs five times as much, and each pass and each check enters one for each op.
    """

    __slots__ = ("_loc", "_token")

    def __init__(self, loc: Loc) -> None:
        self._loc = loc

    def __enter__(self) -> None:
        self._token = _current.set(_current.get() if self._loc is UNKNOWN else self._loc)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current() -> Loc:
    """The user's line that is being worked on."""
    return _current.get() or of_stack()


def of_stack(*, prebuilt: bool = True) -> Loc:
    """The place of the innermost stack frame that belongs to the user.

    Args:
      prebuilt: True if frames of the package's own kernels are the user's.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] -- the one documented way to walk frames
    while frame is not None and (_is_hidden(frame.f_code.co_filename, prebuilt) or _is_generated(frame)):
        frame = frame.f_back
    return UNKNOWN if frame is None else of_code(frame.f_code, frame.f_lasti)


def of_code(code: CodeType, lasti: int) -> Loc:
    """The place of instruction `lasti` of `code`."""
    _seen.add(code.co_filename)
    line, end_line, column, end_column = next(islice(code.co_positions(), lasti // 2, None), (None,) * 4)
    if line is None:
        return Loc(code.co_filename, code.co_firstlineno, function=code.co_name)
    if end_line != line:
        end_column = 10**6
    return Loc(code.co_filename, line, column or 0, end_column or 0, code.co_name)


def of_function(code: CodeType) -> Loc:
    """The `def` line of a function, behind its decorators."""
    _seen.add(code.co_filename)
    decorated = range(code.co_firstlineno, code.co_firstlineno + 50) if code.co_name != "<lambda>" else ()
    for line in decorated:
        if re.match(r"\s*(async\s+)?def\b", linecache.getline(code.co_filename, line)):
            return Loc(code.co_filename, line, function=code.co_name)
    return Loc(code.co_filename, code.co_firstlineno, function=code.co_name)


def assigned_name(loc: Loc) -> str:
    """The variable that the statement at `loc` assigns (`i` for `i = tk.parallel(...)`), "" if there is none."""
    match = re.match(r"\s*([A-Za-z_]\w*)\s*(:[^=]*)?=[^=]", line_of(loc.file, loc.line))
    return match.group(1) if match else ""
