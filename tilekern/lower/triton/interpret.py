"""Run a `Program` in Triton's interpreter, without a GPU.

Triton decides at its import whether its functions compile or interpret. So the interpreter runs in a child process
(`tilekern.lower.triton.interpreter`). The first call starts it, and it serves all later calls.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NoReturn

from tilekern import errors, source
from tilekern.errors import DependencyError, InterpreterError
from tilekern.ir.core import Array
from tilekern.ir.types import dtype_name, kind_of, round_to
from tilekern.lower.triton.compile.toolchain import EXPECTED, FIX, check_version
from tilekern.lower.triton.interpreter.wire import Header, receive, send
from tilekern.lower.triton.program import Argument, Program, Result

Order = Literal["forward", "reverse"] | int
"""Order in which programs run; a number seeds a random order."""


def interpret(
    program: Program, inputs: Sequence[Array], *, order: Order = "forward", timeout: float = 300.0
) -> list[Array]:
    """Run a program on the Func's inputs, and return the Func's outputs.

    Poison (NaN, an odd bit pattern) fills buffers that need not be zero, and lanes that a masked load leaves undefined.
    Narrow floats round to nearest even, and dots accumulate in float32. "tf32" rounds operands. Conversions of
    numbers that do not fit an integer or float8 follow the GPU. Prints go to standard output.

    Args:
      program: the program.
      inputs: the Func's inputs; they are not changed.
      order: order of the programs. They are unordered, so it must not change results.
      timeout: seconds after which a program counts as never ending.

    Raises:
      OutOfBoundsError: an access is outside every array, or leaves the array of its other lanes.
      UnwrittenError: an element of a result is never stored.
      WriteConflictError: two programs store one element, or a program stores to an input.
      DeviceAssertionError: a `tl.device_assert` does not hold.
      InterpreterError: the program is not valid Triton, does not end, or kills the interpreter.
      DependencyError: Triton is not installed, broken, or not of a supported version.
    """
    with source.at(program.loc):
        answer, buffers = _child.ask(_request(program, order), [*inputs, *program.constants], timeout)
    sys.stdout.write(answer["printed"].encode(errors="backslashreplace").decode())  # surrogates have no encoding
    if answer["error"] is not None:
        _raise(program, answer["error"])
    return [_output(result, buffer) for result, buffer in zip(program.results, buffers, strict=True)]


def _output(result: Result, buffer: Array) -> Array:
    """An output from its buffer: partial sums are added up, and converted to the final dtype."""
    if result.partial_sums:
        buffer = buffer.sum(axis=0, dtype=buffer.dtype)
    return round_to(buffer, result.final) if kind_of(result.final) == "float" else buffer.astype(result.final)


def _request(program: Program, order: Order) -> Header:
    """The header of a request: a program as JSON."""
    return {
        "text": program.text,
        "name": program.name,
        "arguments": [_argument(a) for a in program.arguments],
        "operands": program.operands,
        "results": [
            {"shape": r.shape, "dtype": dtype_name(r.dtype), "zeroed": r.zeroed, "alias": r.alias}
            for r in program.results
        ],
        "programs": program.programs,
        "prints": [[line, asdict(printed)] for line, printed in program.prints.items()],
        "order": order,
    }


def _argument(argument: Argument) -> Header:
    box = argument.descriptor
    descriptor = None if box is None else (box.shape, box.strides, box.block)
    return {"name": argument.name, "dtype": dtype_name(argument.dtype), "descriptor": descriptor}


def _raise(program: Program, fault: Header) -> None:
    """Raise the error that the child found, at the user's line behind the generated line."""
    number: int = fault["line"]
    got: str = fault["got"]
    summary: str = fault["summary"]
    if fault["kind"] == "DeviceAssertionError":
        summary = program.messages.get(number, summary)  # in the generated text it has escapes
    if number:
        line = program.text.splitlines()[number - 1].strip()
        place = f"line {number} of the generated source: {line}"
        got = f"{got}, in {place}" if got else place
    with source.at(program.lines.get(number, program.loc)):
        error = getattr(errors, fault["kind"])
        raise error(summary, expected=fault["expected"], got=got, fix=fault["fix"])


class _Child:
    """The interpreter's process. It is started when it is needed, and again after its death; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- the child's standard error, for as long as it lives

    def ask(self, header: Header, arrays: Sequence[Array], timeout: float) -> tuple[Header, list[Array]]:
        """Send a request and wait for its answer."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            expired = threading.Event()
            timer = threading.Timer(timeout, lambda: (expired.set(), process.kill()))
            timer.start()
            try:
                send(process.stdin, header, arrays)
                return receive(process.stdout)
            except (EOFError, BrokenPipeError):
                self._raise_dead(timeout if expired.is_set() else None)
            except BaseException:  # an interrupt: the next request would receive this one's answer
                self.stop()
                raise
            finally:
                timer.cancel()

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            check_version(version("triton"))
        except PackageNotFoundError:
            raise DependencyError("Triton is not installed", expected=EXPECTED, fix=FIX) from None
        # The child can import all that this process can.
        path = os.pathsep.join(directory or os.getcwd() for directory in sys.path)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # tiles are small
        environment = {**os.environ, **threads, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
        self._log.truncate(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tilekern.lower.triton.interpreter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # an interrupt from the terminal is for this process only
        )

    def _raise_dead(self, timeout: float | None) -> NoReturn:
        assert self._process is not None
        status = self._process.wait()
        self.stop()
        if timeout is not None:
            raise InterpreterError("the program does not end", expected=f"an end within {timeout:g} s")
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").strip()[-2000:]
        raise InterpreterError("the interpreter's process died", got=f"exit status {status}\n{tail}".rstrip())


_child = _Child()


def _stop() -> None:
    _child.stop()


def _forget() -> None:
    """A forked process starts a child of its own, and leaves its parent's alone."""
    global _child
    _child = _Child()


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)
