"""Every error that tilekern raises, and the one form they take.

    tilekern.errors.IndexingError: an index of a ref must be a Tile, an integer, a slice, tk.ds or an index vector
      expected: a Tile, an integer scalar, `:`, tk.ds(start, size) or an integer vector
      got: index 1 = 2.5 (float)
      fix: use an integer position
      at /home/me/model.py:14 in scores
         14 |     s = x[i, 2.5]
            |         ^^^^^^^^^

Errors find the user's line by themselves (`source.current`). `assert` is for bugs of the compiler, never for input.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tilekern import source


class TilekernError(Exception):
    """Base of all tilekern errors.

    Attributes:
      summary: one sentence that names the fault.
      expected, got, fix: the accepted input, the actual input (`name=value`), the remedy; "" where not known.
      loc: the user's line.
    """

    def __init__(self, summary: str, *, expected: str = "", got: str = "", fix: str = "") -> None:
        self.summary, self.expected, self.got, self.fix = summary, expected, got, fix
        self.loc = source.current()
        super().__init__(summary)

    def __str__(self) -> str:
        lines = [self.summary]
        details = (("expected", self.expected), ("got", self.got), ("fix", self.fix))
        lines += [f"  {label}: {text}" for label, text in details if text]
        if self.loc is not source.UNKNOWN:
            lines.append(f"  at {self.loc}" + (f" in {self.loc.function}" if self.loc.function else ""))
            lines += [f"  {line}" for line in self.loc.snippet().splitlines()]
        return "\n".join(lines)


# --- what the user wrote -------------------------------------------------------------------------------------------


class ArgumentError(TilekernError, TypeError, ValueError):
    """A kernel was called, traced or declared with arguments that do not fit it."""


class TraceError(TilekernError, TypeError):
    """The body of a kernel does something that cannot be traced to tile code."""


class UnsupportedError(TraceError):
    """An operation of JAX that the language does not have (yet)."""


class IndexingError(TraceError):
    """An index of a ref is of the wrong kind, dtype, rank or size."""


class TileScopeError(TraceError):
    """A Tile or an index was used outside the fold or the kernel that made it."""


class CarryError(TraceError):
    """A loop's body returned a value that does not fit its initial value, or branches returned values of two types."""


class ConcreteValueError(TraceError):
    """Python code asked for the concrete value of a traced one (`if x > 0`, `int(x)`)."""


class OutputError(TraceError):
    """Outputs disagree with the kernel's `out_type`."""


class TargetError(TilekernError, ValueError):
    """A target is unknown, or has no backend here."""


class ResourceError(TilekernError, ValueError):
    """A kernel needs more of the target's memory or threads than one program may have."""


class EstimateError(TilekernError, ValueError):
    """The time of a kernel on a target cannot be estimated."""


class NotDifferentiableError(TilekernError, NotImplementedError):
    """An operation, an access or a loop of a kernel has no derivative, or a rule that is needed is not stated."""


class NotBatchableError(TilekernError, NotImplementedError):
    """A kernel, or an access inside it, has no batching rule."""


class FallbackWarning(UserWarning):
    """A call runs on the portable backend, for the platform's own one refuses it."""


class GatherWarning(UserWarning):
    """Each of several devices computes a whole call, for which XLA gathers arrays that a mesh divides."""


class LargeProgramWarning(UserWarning):
    """A kernel becomes a program that takes the target's compiler minutes, or that spills nearly all of its values."""


class AssemblerWarning(UserWarning):
    """A program was made by a version of NVIDIA's assembler that miscompiles some programs like it."""


# --- what a backend stands on ----------------------------------------------------------------------------------------


class DependencyError(TilekernError, ImportError):
    """A package that the target's backend needs is missing, or not of a version that works."""


class SettingError(TilekernError, ValueError):
    """An environment variable of tilekern has a value that is unknown, or that does not fit this machine."""


class CompileError(TilekernError, RuntimeError):
    """The compiler below the backend failed on the code that the backend wrote."""


# --- what the interpreter found in a running kernel -----------------------------------------------------------------


class InterpreterError(TilekernError):
    """Base of the faults that only the interpreter sees; `loc` is the line of the access."""


class OutOfBoundsError(InterpreterError):
    """An access that was proved to be in bounds was not, or took its position from outside of an array.

    It is a bug of the compiler, or of a Func that was written by hand.
    """


class UnwrittenError(InterpreterError):
    """An element of an output was never stored, or was loaded before it was stored."""


class WriteConflictError(InterpreterError):
    """Two programs stored the same element."""


class DeviceAssertionError(InterpreterError):
    """A `tk.device_assert` does not hold."""


class OrderDependenceError(InterpreterError):
    """The result depends on the order in which programs run."""


# --- bugs of the compiler -------------------------------------------------------------------------------------------


class VerifyError(TilekernError):
    """A Func breaks a rule of the block IR: a bug of the compiler, or a Func built wrongly by hand."""


class PlanError(TilekernError):
    """A plan of a program breaks a rule, such as to read a tile only after it is written: a bug of the compiler."""


class ParseError(TilekernError, ValueError):
    """A text is not the text form of a Func."""


class LoadError(TilekernError, ValueError):
    """A file holds no saved kernel, was changed, or is of a newer version."""


# --- wrong calls ------------------------------------------------------------------------------------------------------

# Errors that Python and JAX raise for arguments that do not fit.
FOREIGN = (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError)
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# An error in here is a bug of the compiler.
_COMPILER = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("autodiff", "ir", "lower", "passes"))


def checked[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function: an error of Python or JAX about its arguments becomes an `ArgumentError`."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except FOREIGN as error:
            refuse(error, function, args, keywords)
            raise

    return call


def refuse(
    error: Exception, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], name: str = ""
) -> None:
    """Raise an `ArgumentError` in the place of an error that a call of a public function raised.

    It returns without an error for a tilekern error, for an error in the user's own code, such as the body of a loop,
    for an error in the compiler, and for an error of a running program, which XLA raises with a status ("INTERNAL:
    ...").
    """
    is_of_program = re.match(r"[A-Z_]+: ", str(error))
    if isinstance(error, TilekernError) or is_of_program or not _is_of_call(error.__traceback__):
        return
    of_class = function.__qualname__.removesuffix(".__init__")
    name = name or ("" if "." in of_class else "tk.") + of_class
    shown = [*map(_shown, args), *(f"{key}={_shown(value)}" for key, value in keywords.items())]
    usage = " ".join((inspect.getdoc(function) or "").split("\n\n", 1)[0].split())
    raise ArgumentError(
        f"{name} does not take these arguments: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        expected=f"{name}{_parameters(function)}",
        got=f"({', '.join(shown)})",
        fix=f"see help({name})" + (f": {usage}" if usage else ""),
    ) from error


def _is_of_call(traceback: TracebackType | None) -> bool:
    """True unless an error was raised in the user's code, in the compiler, or below these."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        is_pythons = file.startswith(_PYTHON) and "site-packages" not in file
        if file.startswith(_COMPILER) or not (source.is_internal(file) or is_pythons):
            return False
        traceback = traceback.tb_next
    return True


def _parameters(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    names = [{p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name for p in parameters]
    return f"({', '.join(name for name in names if name != 'self')})"


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {value.dtype}{value.shape}"
    if type(value).__repr__ is object.__repr__:
        return f"an object of {type(value).__name__}"
    return reprlib.repr(value)


# --- old names, until the next version --------------------------------------------------------------------------------

_OLD = ("OutOfBounds", "Unwritten", "WriteConflict", "OrderDependence", "DeviceAssertion")


def __getattr__(name: str) -> Any:
    """The class of an old name, with a DeprecationWarning."""
    if name not in _OLD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"tilekern.errors.{name} is now {name}Error", DeprecationWarning, stacklevel=2)
    return globals()[f"{name}Error"]
