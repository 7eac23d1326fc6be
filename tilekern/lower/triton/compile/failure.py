"""Failures of Triton as errors that show the user's line, the generated line and a file with all details."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TextIO

from tilekern import source
from tilekern.errors import CompileError
from tilekern.lower import disk_cache
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.program import Program

_STAGES = ("ttir", "ttgir", "llir", "ptx", "amdgcn")
_SHOWN = 400  # characters of Triton's message


def explain(
    error: Exception, program: Program, chip: Chip, file: str, folder: Path, again: Callable[[], object]
) -> CompileError:
    """Explain an error of Triton as a `CompileError`.

    Args:
      error: raised by Triton.
      program: the program that Triton compiled.
      chip: the GPUs that it was compiled for.
      file: the file name of the program's text in Triton.
      folder: holds the stages that Triton finished.
      again: compiles once more.
    """
    # MLIR's passes raise "PassManager::run failed" and write the reason to the process' standard error.
    messages = _stderr_of(again) if isinstance(error, RuntimeError) else ""
    stages = {stage: text for stage in _STAGES if (text := _read(folder, f"{program.name[:150]}.{stage}"))}
    lines = _lines(error, program.text, file, messages, stages.get("ptx", ""))
    dump = _dump(error, program, chip, messages, stages)
    with source.at(next((program.lines[line] for line in lines if line in program.lines), program.loc)):
        return CompileError(
            f"Triton cannot compile `{program.name}` for {chip.name}",
            got=_shorten(_message(error, messages)) + _excerpt(program.text, lines),
            fix=f"this is a bug of tilekern or of Triton; please report it with the file {dump}",
        )


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Hold back the output of this thread, and drop it on a failure, when Triton prints thousands of lines."""
    held = _Buffered(sys.stdout)
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:
        held.thread = 0
    sys.stdout.write(held.text.getvalue())


class _Buffered(io.TextIOBase):
    """A stream that keeps the text of one thread, and passes on the text of other threads."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text, self.thread = stream, io.StringIO(), threading.get_ident()

    def write(self, text: str, /) -> int:
        return (self.text if threading.get_ident() == self.thread else self.stream).write(text)

    def flush(self) -> None:
        self.stream.flush()


def _lines(error: Exception, text: str, file: str, messages: str, ptx: str) -> list[int]:
    """Numbers, from 1, of the lines of the generated source that failed: the innermost first, then its callers."""
    lines: list[int] = []
    for cause in reversed(_causes(error)):
        # The front end: a function of the source and a node of its syntax tree.
        function, node = getattr(cause, "src", None), getattr(cause, "node", None)
        if function and hasattr(node, "lineno") and function in text:
            lines.append(text[: text.index(function)].count("\n") + getattr(node, "lineno", 1))
    lines += map(int, re.findall(rf"{re.escape(file)}:(\d+):\d+: error", messages))  # a pass
    if location := re.search(r"\.ptx, line (\d+)", str(error)):  # the assembler; the PTX names its source in comments
        above = "\n".join(ptx.splitlines()[: int(location[1])])
        lines += map(int, re.findall(rf"\.loc.*{re.escape(file)}:(\d+):", above)[-1:])
    return lines


def _causes(error: BaseException) -> list[BaseException]:
    """`error`, its cause, and so on. An error in a called function is the cause of an error at the call."""
    return [error, *(_causes(error.__cause__) if error.__cause__ else [])]


def _message(error: Exception, messages: str) -> str:
    """The class of `error` and the message of its innermost cause, then up to two reasons of failed passes.

    Example: "RuntimeError: PassManager::run failed; out of shared memory".
    """
    innermost = _causes(error)[-1]
    text = getattr(innermost, "error_message", None) or str(innermost)
    reasons: list[str] = re.findall(r"error: (.*)", messages)
    return f"{type(error).__name__}: {'; '.join([text.strip(), *reasons[:2]])}"


def _shorten(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("Repro command")]
    text = "\n    ".join(lines)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _excerpt(text: str, lines: list[int]) -> str:
    """The innermost generated line with its number, on a line of its own; "" if no line is known."""
    if not lines:
        return ""
    return f"\n    in line {lines[0]} of the generated source: {text.splitlines()[lines[0] - 1].strip()}"


def _dump(error: Exception, program: Program, chip: Chip, messages: str, stages: dict[str, str]) -> str:
    """Write all details of a failure to a file, and return its path; a remark if no folder can be written to."""
    parts = {
        f"{program.name} for {chip.name}, num_warps={program.num_warps}, num_stages={program.num_stages}": program.text,
        "error": "".join(traceback.format_exception(error)),
        "messages of the compiler's passes": messages,
        **stages,
    }
    content = "\n".join(f"======== {title}\n{text}" for title, text in parts.items() if text)
    name = f"{program.name[:100]}-{disk_cache.key([program.text, chip.name])[:12]}.txt"
    base = disk_cache.folder()
    if base is not None:
        with contextlib.suppress(OSError):
            path = base / "failures" / name
            base.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(content)
            return str(path)
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", prefix="tilekern-", suffix=f"-{name}", delete=False) as file:
            file.write(content)
        return file.name
    return "(no folder could be written to)"


def _read(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_text() if path.exists() else ""


def _stderr_of(call: Callable[[], object]) -> str:
    """The text that a failing call writes to standard error, also from C++."""
    with tempfile.TemporaryFile() as file:
        with _standard_error_to(file.fileno()), contextlib.suppress(Exception):
            call()
        file.seek(0)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def _standard_error_to(descriptor: int) -> Generator[None]:
    original = os.dup(2)
    try:
        os.dup2(descriptor, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
