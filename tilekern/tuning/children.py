"""Processes that compile and run candidates: one that hangs, crashes or runs out of memory is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tilekern.kernel.tuned import VARIABLE

COMMAND = (sys.executable, "-m", "tilekern.tuning.worker")
NO_ANSWER = "hangs: no answer"
"""How the reason begins why a candidate is refused whose process took longer than its limit."""

_START = 120.0  # seconds that a process may take to import what it needs, on a busy machine

type Message = Mapping[str, Any]


class Lost(Exception):
    """A process hung or died."""


class Child:
    """A process that answers messages, one line of JSON each.

    Args:
      folder: the folder with `setup.json`.
      command: starts it; the folder is the last argument.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        paths = [os.path.abspath(path) for path in sys.path]
        # Several processes share a GPU.
        changes = {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **changes},
            start_new_session=True,
        )
        self._is_ready = False

    def ask(self, message: Message, seconds: float) -> dict[str, Any]:
        """The answer to a message.

        Raises:
          Lost: the process does not answer in time, or has died; it is gone then.
        """
        assert self._process.stdin is not None
        if not self._is_ready:
            self._answer(_START)
            self._is_ready = True
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        return json.loads(self._answer(seconds))

    def _answer(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        file, end, line = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise Lost(f"{NO_ANSWER} in {seconds:.0f} s")
            part = os.read(file, 1 << 16)
            if not part:
                raise self._died()
            line += part
        return line

    def _died(self) -> Lost:
        code = self._process.wait()
        self.close()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Lost(f"crashes: {name}")

    def close(self) -> None:
        """End the process, and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Children:
    """A few such processes; one that is lost is started again when it is needed.

    Args:
      count: how many.
      folder: the folder with `setup.json`.
      command: starts one.
    """

    def __init__(self, count: int, folder: Path, command: Sequence[str] = COMMAND) -> None:
        self._folder, self._command = folder, command
        self._threads = ThreadPoolExecutor(count)
        self._idle: queue.LifoQueue[Child | None] = queue.LifoQueue()
        self.count = count
        for _ in range(count):
            self._idle.put(Child(folder, command))  # all start at once, for imports take seconds

    def ask(self, message: Message, seconds: float) -> dict[str, Any]:
        """The answer of a process that is idle; if it is lost, {"refused": the reason}."""
        child = self._idle.get()
        try:
            child = child or Child(self._folder, self._command)
            return child.ask(message, seconds)
        except Lost as error:
            child = None
            return {"refused": str(error)}
        finally:
            self._idle.put(child)

    def ask_all(
        self, messages: Sequence[Message], seconds: float, answered: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """The answers to messages, in their order; processes work at the same time."""

        def ask(message: Message) -> dict[str, Any]:
            answer = self.ask(message, seconds)
            answered()
            return answer

        return list(self._threads.map(ask, messages))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # A thread that waits for an answer gets none from a process that is closed.
        self._threads.shutdown(wait=error is None, cancel_futures=True)
        while not self._idle.empty():
            child = self._idle.get()
            if child is not None:
                child.close()
