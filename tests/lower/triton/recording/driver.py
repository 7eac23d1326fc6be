"""Launches of compiled programs by jaxlib's own code, on a driver that records them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bench.gpu.pretended.build import MissingError, build
from tilekern.lower.triton.call_message import Launch
from tilekern.lower.triton.program import Program

Call = dict[str, Any]
"""One call to the driver, as `bench/gpu/pretended` records it."""


@dataclass(frozen=True)
class Recorded:
    """One launch.

    Attributes:
      asked: what jaxlib was asked to launch.
      error: jaxlib's error, None if it launched.
      calls: what it asked of the driver, in order.
    """

    asked: Launch
    error: str | None
    calls: tuple[Call, ...]

    def of(self, kind: str) -> list[Call]:
        """The calls of a kind: "module", "opt-in", "map", "fill" or "launch"."""
        return [call for call in self.calls if call["call"] == kind]


class Driver:
    """A process in which jaxlib launches programs on a recording driver for GPUs of one capability."""

    def __init__(self, library: Path, capability: int) -> None:
        variables = {
            "LD_LIBRARY_PATH": str(library.parent),
            "PRETENDED_RECORD": str(library.with_name(f"record of {capability}")),
            "PRETENDED_CAPABILITY": str(capability),
        }
        command = [sys.executable, str(Path(__file__).with_name("child.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **variables}, text=True
        )

    def launch(self, asked: Launch, buffers: Sequence[int]) -> Recorded:
        """Launch a program on buffers at some addresses."""
        assert self._process.stdin is not None and self._process.stdout is not None
        opaque = base64.b64encode(zlib.compress(asked.encode())).decode()
        self._process.stdin.write(json.dumps({"opaque": opaque, "buffers": list(buffers)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            driver.cache_clear()  # the next test starts another process
            raise AssertionError(f"the process ended within a launch: {self._process.wait()}")
        got = json.loads(answer)
        return Recorded(asked, got["error"], tuple(got["calls"]))


@cache
def _folder() -> TemporaryDirectory[str]:
    """The folder of the driver and of its records, until this process ends."""
    return TemporaryDirectory(prefix="tilekern-driver-")


@cache
def _library() -> Path:
    return build(Path(_folder().name))[0]


@cache
def driver(capability: int = 90) -> Driver:
    """The process for a capability; the test is skipped where something is missing."""
    if find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax-cuda13-plugin")
    try:
        return Driver(_library(), capability)
    except MissingError as missing:
        pytest.skip(f"needs {missing}")


def addresses(program: Program) -> list[int]:
    """An address for each argument, far from each other; a result that is written in place has that of its operand."""
    found = [(n + 1) << 40 for n in range(len(program.operands))]
    for number, result in enumerate(program.results, len(found)):
        found.append((number + 1) << 40 if result.alias is None else found[result.alias])
    return found
