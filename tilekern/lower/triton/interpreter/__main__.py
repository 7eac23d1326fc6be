"""The child process: it reads requests from standard input, and answers each on standard output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from queue import SimpleQueue

from tilekern.errors import DependencyError, TilekernError
from tilekern.ir.core import Array
from tilekern.lower.triton.compile.toolchain import EXPECTED, FIX
from tilekern.lower.triton.interpreter.corrections import correct
from tilekern.lower.triton.interpreter.launch import Launcher, line_of
from tilekern.lower.triton.interpreter.wire import Header, receive, send

Request = tuple[Header, list[Array]]


def serve() -> None:
    """Answer requests until the parent is gone."""
    # The pipe carries answers only.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    launcher = _launcher()
    while True:
        header, arrays = _answer(launcher, *requests.get())
        send(answers, header, arrays)


def _launcher() -> Launcher | DependencyError:
    """The launcher; or, if Triton cannot be used, the error that answers all requests."""
    try:
        return Launcher(correct())
    except Exception as error:  # a broken Triton raises anything
        got = f"{type(error).__name__}: {error}"
        return DependencyError("Triton's interpreter does not work", expected=EXPECTED, got=got, fix=FIX)


def _listen(requests: SimpleQueue[Request]) -> None:
    """Pass requests on. It runs in a thread, so that the child ends with its parent even while a kernel loops."""
    while True:
        try:
            requests.put(receive(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _answer(launcher: Launcher | DependencyError, request: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
    """The answer to a request: results or an error, and the printed text."""
    printed = io.StringIO()
    if isinstance(launcher, DependencyError):
        return {"error": _fault(launcher), "printed": ""}, []
    try:
        with contextlib.redirect_stdout(printed):
            results = launcher.run(request, arrays)
    except Exception as error:  # generated text may raise anything
        return {"error": _fault(error), "printed": printed.getvalue()}, []
    return {"error": None, "printed": printed.getvalue()}, results


def _fault(error: Exception) -> Header:
    """An error as JSON. An error of another library gets a traceback, unless a line of the text explains it."""
    line = line_of(error)
    if isinstance(error, TilekernError):
        kind, summary, expected, got = type(error).__name__, error.summary, error.expected, error.got
        fix = error.fix
    else:
        kind, summary, expected, fix = "InterpreterError", f"{type(error).__name__}: {error}", "", ""
        got = "" if line else "".join(traceback.format_exception(error))
    return {"kind": kind, "summary": summary, "expected": expected, "got": got, "fix": fix, "line": line}


if __name__ == "__main__":
    serve()
